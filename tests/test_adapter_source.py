"""Adapters by name: texts, files, directories and AImages."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
    VerificationError,
)
from clowder_aimage.generation.request import GenerateRequest, LoraUse
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model import adapter_source
from clowder_aimage.model.adapter_source import AdapterEntry, AdapterFinder, is_path
from clowder_aimage.model.lora_text import list_missing_words, parse_use, take_tags
from clowder_aimage.oci import Digest, Reference
from tests.conftest import TINY
from tests.lora_file import write_lora

# -- texts


@pytest.mark.parametrize(
    ("text", "name", "strength"),
    [
        ("style", "style", None),
        ("style:v1", "style:v1", None),
        ("style:v1:0.8", "style:v1", 0.8),
        ("style:v1:2", "style:v1", 2.0),
        ("style:1", "style:1", None),  # a tag
        ("style:-1", "style", -1.0),
        ("style:+.5", "style", 0.5),
        ("style:1.", "style", 1.0),
        ("host:5000/x", "host:5000/x", None),
        ("host:5000/x:1", "host:5000/x:1", None),
        ("host:5000/x:1:1", "host:5000/x:1", 1.0),
        ("host:5000/x:0.5", "host:5000/x", 0.5),
        ("x@sha256:" + "1" * 64, "x@sha256:" + "1" * 64, None),
        ("x@sha256:" + "1" * 64 + ":2", "x@sha256:" + "1" * 64, 2.0),
        ("file.safetensors:1", "file.safetensors", 1.0),
        ("style:1e3", "style:1e3", None),
        ("style:nan", "style:nan", None),
    ],
)
def test_a_strength_is_told_from_a_tag(text: str, name: str, strength: float | None) -> None:
    found = parse_use(text, lambda name: name.endswith(".safetensors"))
    assert found == LoraUse(name, strength)


@pytest.mark.parametrize("text", ["", " ", ":", ":0.5", " :0.5"])
def test_an_adapter_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(AImageError, match=r"no name|not found"):
        AdapterFinder(ImageLayout(Path("none")), lambda _: pytest.fail()).find(parse_use(text))


@pytest.mark.parametrize(
    ("prompt", "text", "uses"),
    [
        ("a fox", "a fox", []),
        ("  kept  as it is ", "  kept  as it is ", []),
        ("<lora:ink:0.8> a fox", "a fox", [("ink", 0.8)]),
        ("a <lora:ink:1> fox", "a fox", [("ink", 1.0)]),
        ("a fox, <lora:ink>, night", "a fox, night", [("ink", None)]),
        ("a fox<LORA:a/b:v1:-.5><lora:c>", "a fox", [("a/b:v1", -0.5), ("c", None)]),
        ("a fox <lora:ink>.", "a fox.", [("ink", None)]),
        ("<lora:ink>", "", [("ink", None)]),
        ("a <lora:ink fox", "a <lora:ink fox", []),
    ],
)
def test_tags_are_taken_from_a_prompt(
    prompt: str, text: str, uses: list[tuple[str, float | None]]
) -> None:
    assert take_tags(prompt) == (text, tuple(LoraUse(*use) for use in uses))


def test_a_tag_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="<lora: :1>"):
        take_tags("a <lora: :1>")


def test_trigger_words_are_those_that_a_prompt_lacks() -> None:
    assert list_missing_words("An INK fox", ["ink", "bold", "bold"]) == ["bold"]


@pytest.mark.parametrize(
    "loras",
    [
        [{"model": "x", "strength": 100.5}],
        [{"model": "x", "strength": float("nan")}],
        [{"model": "x", "strength": float("-inf")}],
        [{"model": "x", "strength": True}],
        [{"model": "\ud800"}],
        [{"model": 3}],
        [{"model": "x", "strength": 1.0, "digest": 3}],
        ["x"],
        [LoraUse("x")] * 17,
    ],
)
def test_parameters_of_adapters_are_checked(loras: Any) -> None:
    with pytest.raises(UsageError, match="loras"):
        GenerateRequest.of("a", loras=loras)


def test_a_request_takes_the_objects_that_another_process_sends() -> None:
    request = GenerateRequest.of("a", loras=[{"model": "x", "strength": 0.5}])
    assert request.adapters.loras == (LoraUse("x", 0.5),)


# -- finding


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ImageLayout:
    """Return a store with the tiny model as ``tiny``, and its adapter as ``style``."""
    root = tmp_path_factory.mktemp("adapters")
    found = ImageLayout(root / "store")
    create(found, Reference.parse("tiny"), TINY)
    file = write_lora(root / "x.safetensors", trigger_words="ink", recommended_weight="0.7")
    create(found, Reference.parse("style"), file)
    return found


def finder(layout: ImageLayout, directory: Path | None = None, **more: Any) -> AdapterFinder:
    return AdapterFinder(layout, lambda one: read_aimage(layout, one), directory, **more)


def test_an_adapter_of_the_store_is_found(layout: ImageLayout) -> None:
    found = finder(layout).find(LoraUse("style"))
    descriptor = layout.resolve(Reference.parse("style"))
    assert found.path.read_bytes()[8:9] == b"{" and found.digest == descriptor.digest
    assert found.words == ("ink",)
    assert found.use(None) == LoraUse("style", 0.7, str(descriptor.digest))
    assert finder(layout).find(found.use(0.5)).digest == descriptor.digest


def test_a_file_of_the_directory_is_found_by_its_relative_name(
    layout: ImageLayout, tmp_path: Path
) -> None:
    path = write_lora(tmp_path / "styles" / "My Ink.safetensors", recommended_weight="0.5")
    own = finder(layout, tmp_path)
    for name in ("styles/My Ink", "styles/My Ink.safetensors"):
        found = own.find(LoraUse(name))
        assert found.path == path and found.name == name
        digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        assert found.use(None) == LoraUse(name, 0.5, digest)
    assert [(one.name, one.metadata["weight"]) for one in own.list_files()] == [
        ("styles/My Ink", 0.5)
    ]


def test_the_digest_of_a_file_follows_its_content(layout: ImageLayout, tmp_path: Path) -> None:
    path, own = write_lora(tmp_path / "a.safetensors", 1), finder(layout, tmp_path)
    first = own.find(LoraUse("a"))
    write_lora(path, 2)
    os.utime(path, ns=(1, 1))
    second = own.find(LoraUse("a"))
    assert first.digest != second.digest
    with pytest.raises(VerificationError, match=f"not {first.digest}"):
        own.find(first.use(1.0))


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "styles/../../secret",
        "/etc/passwd",
        "outside",
        "outside/secret",
        "loop",
        "pipe",
        "folder",
        "a\0b",
        "a\nb",
        "x" * 4000,
        "..",
        ".",
        "styles\\ink",
    ],
)
def test_no_name_leaves_the_directory(layout: ImageLayout, tmp_path: Path, name: str) -> None:
    write_lora(tmp_path / "secret.safetensors")
    root = tmp_path / "loras"
    (root / "folder.safetensors").mkdir(parents=True)
    (root / "outside").symlink_to(tmp_path)
    (root / "outside.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (root / "loop.safetensors").symlink_to(root / "loop.safetensors")
    os.mkfifo(root / "pipe.safetensors")
    with pytest.raises(NotFoundError, match="not found"):
        finder(layout, root).find(LoraUse(name))
    assert not finder(layout, root).list_files() and finder(layout, root).find_file(name) is None


def test_a_link_within_the_directory_is_followed(layout: ImageLayout, tmp_path: Path) -> None:
    write_lora(tmp_path / "v2.safetensors")
    (tmp_path / "ink.safetensors").symlink_to("v2.safetensors")
    assert finder(layout, tmp_path).find(LoraUse("ink")).name == "ink"


def test_files_are_found_by_their_paths_on_the_command_line_only(
    layout: ImageLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lora(tmp_path / "ink.safetensors")
    monkeypatch.chdir(tmp_path)
    for name, recorded in {str(path): path.name, "ink.safetensors": "ink.safetensors"}.items():
        assert finder(layout, has_files=True).find(LoraUse(name)).name == recorded
        with pytest.raises(NotFoundError):
            finder(layout).find(LoraUse(name))


def test_a_directory_of_peft_is_an_adapter(layout: ImageLayout, tmp_path: Path) -> None:
    write_lora(tmp_path / "ink" / "adapter_model.safetensors")
    (tmp_path / "ink" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    use = LoraUse(str(tmp_path / "ink"))
    assert finder(layout, has_files=True).find(use).config == {"peft_type": "LORA", "r": 2}
    (tmp_path / "ink" / "adapter_config.json").write_text("[]")
    with pytest.raises(FormatError, match="not a JSON object"):
        _ = finder(layout, has_files=True).find(use).config


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("tiny", UsageError, "tiny is not an adapter"),
        ("missing", NotFoundError, "adapter missing:latest not found"),
        ("Not A Name", NotFoundError, "adapter 'Not A Name' not found"),
        ("./none.safetensors", NotFoundError, "no file ./none.safetensors"),
        ("old.pt", UsageError, "pickle"),
        ("empty.safetensors", FormatError, "empty"),
        ("~nobody-here/a.safetensors", NotFoundError, "no file ~nobody-here"),
        ("./" + "x" * 4000, NotFoundError, "no file"),
        ("x" * 4000, NotFoundError, "not found"),
        ("a\0b", NotFoundError, "not found"),
        (".", NotFoundError, "not found"),
    ],
)
def test_what_is_not_an_adapter_is_refused(
    layout: ImageLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type[AImageError],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(kind, match=message):
        finder(layout, has_files=True).find(LoraUse(name))


def test_an_error_has_the_index_of_its_adapter(layout: ImageLayout) -> None:
    request = GenerateRequest.of("a", loras=(LoraUse("style"), LoraUse("none")))
    with pytest.raises(NotFoundError) as raised:
        finder(layout).find_all(request)
    assert raised.value.facts["adapter"] == "1"


@pytest.mark.parametrize("weight", [1e9, -101, True, "x", None])
def test_a_recommended_strength_out_of_bounds_is_not_used(weight: object) -> None:
    digest = Digest("sha256", "0" * 64)
    found = AdapterEntry("x", digest, Path("x"), {"weight": weight})
    assert found.resolve_strength(None) == 1.0 and found.resolve_strength(0.0) == 0.0


def test_a_request_is_resolved_with_strengths_digests_and_words(layout: ImageLayout) -> None:
    request = GenerateRequest.of("a fox", loras=(LoraUse("style"), LoraUse("style", -1.0)))
    digest = str(layout.resolve(Reference.parse("style")).digest)
    base = AImage(b"{}", ())
    resolved, words = finder(layout).resolve(request, base, layout)
    assert resolved.adapters.loras == (
        LoraUse("style", 0.7, digest),
        LoraUse("style", -1.0, digest),
    )
    assert (resolved.prompt, words) == ("a fox", ["ink"])
    resolved, words = finder(layout).resolve(request, base, layout, adds_words=True)
    assert (resolved.prompt, words) == ("a fox, ink", [])


@pytest.mark.parametrize("text", ["./x", "/x", "~/x", "x.safetensors", "x.ckpt"])
def test_paths_are_told_from_names(text: str) -> None:
    assert is_path(text) and not is_path("team/style:v1")


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="of style: No such file"):
        adapter_source._read_beside(tmp_path / "adapter_config.json", "style")


def test_a_listing_of_a_directory_is_bounded(
    layout: ImageLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_source, "_MAX_LISTED", 2)
    for name in ("a", "b/c", "d/e", "f"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.safetensors").touch()
    finder = AdapterFinder(layout, lambda _: None, tmp_path)  # type: ignore[arg-type, return-value]
    assert finder._list_names() == ["a", "f"]

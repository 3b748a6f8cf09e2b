"""``run --first``: a smaller variant is used while the store lacks the AImage."""

from __future__ import annotations

import importlib
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.cli.worker import image_model
from clowder_aimage.errors import NetworkError
from clowder_aimage.oci import Digest, mediatype
from tests.conftest import TINY
from tests.process import Aimage, Done
from tests.real_registry import RealRegistry

pytest.importorskip("mlx.core", reason="mlx is not installed")

run_verb = importlib.import_module("clowder_aimage.cli.verbs.run")
SMALL = ("a fox", "--steps", 1, "--seed", 1, "-o", "x.png")
HOME = "first"  # the repository of all tests


@pytest.fixture(scope="session")
def variants(
    tmp_path_factory: pytest.TempPathFactory, registry: RealRegistry, abridged: Path
) -> tuple[Aimage, dict[str, str]]:
    """Return a command line and the digests of the pushed AImages, by tag.

    ``int4`` is a variant of ``v1``, and ``third-int4`` one of ``third``, which cannot be
    run; a file of ``other`` differs; ``loose`` is int8 and has no subject.
    """
    home = tmp_path_factory.mktemp("variants")
    here, name = Aimage(home, home / "store"), f"{registry.host}/{HOME}/tiny"
    digests = {}
    shutil.copytree(TINY, home / "other")
    with (home / "other" / "tokenizer" / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    for tag, path in (("v1", TINY), ("other", home / "other"), ("third", abridged)):
        digests[tag] = here("create", f"{name}:{tag}", path, "-q").line
    for tag, base in (("int4", "v1"), ("third-int4", "third")):
        convert = ("convert", f"{name}:{base}", f"{name}:{tag}", "--quantize", "q4", "--attach")
        digests[tag] = here(*convert, "-q").line
    here("convert", f"{name}:third", f"{name}:loose", "--quantize", "int8", "-q")
    for tag in ("v1", "other", "third", "int4", "third-int4", "loose"):
        here("push", f"{name}:{tag}", "-q")
    return here, digests


@pytest.fixture
def name(variants: object, registry: RealRegistry) -> str:
    return f"{registry.host}/{HOME}/tiny"


def loads(done: Done) -> Any:
    return json.loads(done.out)


def index(here: Aimage, name: str, tag: str, **children: str) -> str:
    """Push an index of manifests by variant; return its name."""
    entries = []
    for variant, child in children.items():
        fetched = here("manifest", "fetch", f"{name}:{child}").out.encode().removesuffix(b"\n")
        found = {"mediaType": mediatype.OCI_MANIFEST, "digest": str(Digest.of(fetched))}
        annotations = {mediatype.VARIANT: variant}
        entries.append(found | {"size": len(fetched), "annotations": annotations})
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries}
    file = here.home / "index.json"
    file.write_text(json.dumps(document))
    here("manifest", "push", f"{name}:{tag}", file, "-q")
    return f"{name}:{tag}"


def test_an_attached_variant_is_used_until_the_aimage_is_there(
    aimage: Callable[[], Aimage], variants: tuple[Aimage, dict[str, str]], name: str
) -> None:
    here, (_, digests) = aimage(), variants
    run = ("run", f"{name}:v1", *SMALL, "--json", "--first", "q4")
    said = here(*run)
    facts = loads(said)
    assert (facts["reference"], facts["digest"]) == (f"{name}:v1", digests["int4"])
    assert "its variant int4 is used" in said.err
    assert here("ls", "-q").line == f"{name}@{digests['int4']}"  # the AImage was not pulled
    assert here("replay", "x.png").line == "equal"
    here("pull", f"{name}:v1", "-q")
    assert loads(here(*run))["digest"] == digests["v1"]


def test_a_variant_in_an_index_is_used(
    aimage: Callable[[], Aimage], variants: tuple[Aimage, dict[str, str]], name: str
) -> None:
    here, (other, digests) = aimage(), variants
    tag = index(other, name, "both", bf16="v1", int4="int4")
    here("run", tag, *SMALL, code=2)  # several match
    assert loads(here("run", tag, *SMALL, "--json", "--first", "int4"))["digest"] == digests["int4"]


@pytest.mark.parametrize(("child", "why"), [("third-int4", "its subject is"), ("other", "differs")])
def test_a_variant_of_another_aimage_is_refused(
    aimage: Callable[[], Aimage],
    variants: tuple[Aimage, dict[str, str]],
    name: str,
    child: str,
    why: str,
) -> None:
    here = aimage()
    tag = index(variants[0], name, f"not-{child}", bf16="v1", int4=child)
    said = here("run", tag, *SMALL, "--first", "int4", code=5)
    assert f"the variant int4 of {tag} is {variants[1][child]}" in said.err
    assert why in said.err
    assert not here.store.exists()


def test_without_a_variant_the_aimage_is_used(
    aimage: Callable[[], Aimage], variants: tuple[Aimage, dict[str, str]], name: str
) -> None:
    here = aimage()
    said = here(
        "run", f"{name}:v1", *SMALL, "--json", "--first", "int8"
    )  # ``loose`` has no subject
    assert loads(said)["digest"] == variants[1]["v1"]
    assert f"{name}:v1 has no variant int8: it is used itself" in said.err
    here("tag", f"{name}:v1", "local", "-q")
    assert loads(here("run", "local", *SMALL, "--json", "--first", "int4"))["digest"]
    here("run", "absent", *SMALL, "--first", "int4", code=3)


def test_the_precision_must_be_known(aimage: Callable[[], Aimage]) -> None:
    for arguments, said in (
        (("run", "x", "a fox", "--first", "int3"), "unknown precision 'int3'"),
        (("run", f"r.example/x@sha256:{'0' * 64}", "a fox", "--first", "int4"), "names one AImage"),
        (("serve", "--first", "int3"), "--first: unknown precision 'int3'"),
        (("convert", "x", "y", "--dtype", "auto", "--attach"), "--attach requires --quantize"),
    ):
        assert said in aimage()(*arguments, code=2).err


def test_between_two_prompts_the_variant_is_replaced(
    aimage: Callable[[], Aimage],
    variants: tuple[Aimage, dict[str, str]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prompts(make: Callable[[str], tuple[str, ...]], *_: object) -> None:
        make("a fox")
        for thread in threading.enumerate():
            if thread.name == "aimage-pull":
                thread.join()
        make("a fox")

    monkeypatch.setattr(run_verb, "read_prompt", lambda _: None)
    monkeypatch.setattr(run_verb, "read_prompts", prompts)
    here = aimage()
    options = ("--steps", 1, "--seed", 1, "--json", "--first", "int4")
    said = here("run", f"{name}:v1", *options)
    digests: list[Any] = [json.loads(line)["digest"] for line in said.out.splitlines()]
    assert digests == [variants[1]["int4"], variants[1]["v1"]]
    assert f"{name}:v1 has been pulled and is used instead of its variant" in said.err
    assert set(here("ls", "-q").out.split()) == {f"{name}:v1", f"{name}@{digests[0]}"}


def test_a_failed_pull_keeps_the_variant(
    aimage: Callable[[], Aimage],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prompts(make: Callable[[str], tuple[str, ...]], *_: object) -> None:
        make("a fox")
        make("a fox")

    def fail(*_: object) -> SimpleNamespace:
        result = Future[None]()
        result.set_exception(NetworkError("the link is down"))
        return SimpleNamespace(result=result)

    monkeypatch.setattr(image_model, "pull_later", fail)
    monkeypatch.setattr(run_verb, "read_prompt", lambda _: None)
    monkeypatch.setattr(run_verb, "read_prompts", prompts)
    said = aimage()("run", f"{name}:v1", "--steps", 1, "--first", "int4")
    assert said.err.count("cannot be used instead of its variant: the link is down") == 1
    assert len(said.out.split()) == 2


def test_the_config_of_a_variant_names_its_precision(
    variants: tuple[Aimage, dict[str, str]], name: str
) -> None:
    here, digests = variants
    manifest = json.loads(here("manifest", "fetch", f"{name}:int4").out)
    assert manifest["annotations"][mediatype.VARIANT] == "int4"
    assert manifest["subject"]["digest"] == digests["v1"]
    (found,) = loads(here("referrers", f"{name}:v1", "--json"))
    assert (found["digest"], found["annotations"]) == (digests["int4"], manifest["annotations"])
    path = Path(here.home / "manifest.json")
    path.write_text(json.dumps(manifest))
    here("validate", path)

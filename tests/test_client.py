"""The public Python interface: its names and signatures, and what its functions do."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clowder_aimage
from clowder_aimage import (
    AImageError,
    Answer,
    Model,
    Picture,
    Reference,
    Registry,
    Store,
    Worker,
    create,
    load,
    pull,
    push,
)
from clowder_aimage.client.picture import PictureFile
from clowder_aimage.client.progress import ProgressCounter, count_progress
from clowder_aimage.content.copy_option import CopyEvent
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.oci import Descriptor
from tests.abridged import abridge
from tests.conftest import TINY
from tests.controlnet_file import tensors, write_file
from tests.lora_file import write_lora
from tests.process import run
from tests.real_registry import PASSWORD, USER, RealRegistry

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"
Draw = Callable[..., Picture]
# A change here is a change for users: it needs an entry in CHANGELOG.md.
SIGNATURES: dict[Any, str] = {
    create: "name path * store base loras dtype quantize license source annotations "
    "steps guidance progress",
    load: "name * store registry backend dtype device progress",
    pull: "name * store registry components include progress",
    push: "name * store registry dialect progress",
    Store: "path",
    Registry: "host * username password plain_http insecure ca_file",
    Model.generate: "self prompt * image mask control references loras size progress **parameters",
    Model.chat: "self messages * on_text **parameters",
    Model.embed: "self texts * prompt",
    Registry.copy: "self name target * recursive progress",
    Registry.attach: "self name *files artifact_type annotations progress",
    Registry.referrers: "self name * artifact_type recursive",
    Store.diff: "self a b * registry",
    Worker: "url * token model",
    Picture: "pixels seed facts mark",
    Picture.encode: "self kind",
    Picture.save: "self path",
    Reference.parse: "text",
}
MEMBERS = {
    Store: "diff digest export names remove show tag",
    Registry: "attach copy delete digest referrers repositories show tag tags",
    Model: "achat aembed agenerate chat close embed generate",
    Worker: "achat aembed agenerate chat embed generate url",
    Picture: "encode image mark pixels save",
    Answer: "prompt_tokens reason text thinking tokens warnings",
}


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the directories of a user without settings."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AIMAGE_STORE", str(tmp_path / "store"))
    for name in ("AIMAGE_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def abridged(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Return the tiny model with one tensor of each network."""
    return abridge(tiny, tmp_path_factory.mktemp("abridged") / "tiny")


def parameters(function: Any) -> str:
    names = list[str]()
    for each in inspect.signature(function).parameters.values():
        stars = "**" if each.kind is each.VAR_KEYWORD else "*"
        stars = stars if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) else ""
        if each.kind is each.KEYWORD_ONLY and not any(name[0] == "*" for name in names):
            names.append("*")
        names.append(f"{stars}{each.name}")
    return " ".join(names)


def test_the_public_names_are_pinned() -> None:
    names = {
        "AImageError",
        "Answer",
        "Model",
        "Picture",
        "Reference",
        "Registry",
        "Store",
        "Worker",
    }
    assert set(clowder_aimage.__all__) == names | {"create", "load", "pull", "push"}
    assert set(clowder_aimage.__all__) <= set(dir(clowder_aimage))


def test_the_signatures_are_pinned_and_in_the_documentation() -> None:
    page = PAGE.read_text("utf-8")
    for function, expected in SIGNATURES.items():
        assert parameters(function) == expected
        text = expected.removeprefix("self ").replace(" ", ", ")
        assert function is Picture or f"`{function.__name__}({text})" in page, function
    for kind, members in MEMBERS.items():
        own = {name for name in dir(kind) if name[0] != "_"}
        assert own == set(members.split()), kind.__name__
        assert all(f"`{name}" in page for name in own)


def test_a_function_takes_precedence_over_the_module_of_its_name() -> None:
    import clowder_aimage.load
    import clowder_aimage.pull

    found: Any = clowder_aimage.pull
    assert found is pull and callable(pull)
    assert sys.modules["clowder_aimage.pull"] is not pull
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = clowder_aimage.nothing


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import clowder_aimage, sys; print([m for m in sys.modules if 'clowder_aimage.' in m])"
    assert run([sys.executable, "-c", code], text=True).stdout == "[]\n"


def test_an_aimage_is_created_pushed_and_pulled(
    abridged: Path, registry: RealRegistry, tmp_path: Path
) -> None:
    name, seen = f"{registry.host}/api/tiny:v1", []
    digest = create(name, abridged, progress=lambda *counts: seen.append(counts))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > 0
    assert push(Reference.parse(name)) == digest
    second, seen = Store(tmp_path / "second"), []
    assert pull(name, store=second, progress=lambda *counts: seen.append(counts)) == digest
    assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)
    assert Store().names() == second.names() == [name]
    assert second.digest(name) == Registry(registry.host).digest("api/tiny:v1") == digest
    assert "api/tiny" in Registry(registry.host).repositories()
    assert Registry(registry.host).tags("api/tiny") == ["v1"]


def test_a_store_is_changed_by_name(abridged: Path, tmp_path: Path) -> None:
    create("tiny", abridged)
    store = Store()
    assert store.path == tmp_path / "store" and "tiny" in store
    store.tag("tiny", "other:v1")
    assert store.names() == ["other:v1", "tiny:latest"]
    assert store.show("tiny")["config"]["pipeline"] == "ZImagePipeline"
    written = store.export("other:v1", tmp_path / "out")
    assert (written / "model_index.json").read_bytes() == (
        abridged / "model_index.json"
    ).read_bytes()
    store.remove("other:v1")
    assert "other:v1" not in store
    with pytest.raises(NotFoundError):
        store.remove("other:v1")
    with pytest.raises(UsageError, match="a tag is needed"):
        store.tag("tiny", f"x@{store.digest('tiny')}")


def test_names_in_a_registry_are_copied_tagged_described_and_deleted(
    abridged: Path, registry: RealRegistry, tmp_path: Path
) -> None:
    name = f"{registry.host}/api/whole:v1"
    digest = create(name, abridged, annotations={"org.example.team": "paint"})
    push(name)
    remote, file = Registry(registry.host), tmp_path / "sbom.json"
    file.write_text("{}")
    shown = remote.show("api/whole:v1")
    assert shown["digest"] == digest and shown["config"]["pipeline"] == "ZImagePipeline"
    sent = remote.attach(name, file, artifact_type="application/spdx+json", annotations={"a": "b"})
    (entry,) = remote.referrers("api/whole:v1")
    assert (entry["digest"], entry["artifactType"]) == (sent, "application/spdx+json")
    assert remote.referrers(name, artifact_type="text/none", recursive=True) == []
    target = f"{registry.host}/api/copied:v2"
    assert remote.copy("api/whole:v1", target, recursive=True) == digest
    assert remote.referrers(target)[0]["digest"] == sent
    remote.tag("api/copied:v2", "stable")
    assert sorted(remote.tags("api/copied")) == ["stable", "v2"]
    remote.delete(f"api/copied@{digest}")
    with pytest.raises(NotFoundError):
        remote.digest("api/copied:v2")
    for whole in ("api/copied", Reference.parse(target).name):
        with pytest.raises(UsageError, match="neither tag nor digest"):
            remote.delete(whole)
    with pytest.raises(UsageError, match="not in the registry"):
        remote.digest("other.example/api/whole:v1")


def test_aimages_are_compared(abridged: Path, registry: RealRegistry, tmp_path: Path) -> None:
    name = f"{registry.host}/api/compared:v1"
    create(name, abridged)
    push(name)
    store = Store(tmp_path / "other")
    create("half", abridged, store=store, dtype="f16")
    compared = store.diff(name, "half")
    assert compared["a"]["where"] == "registry" and compared["b"]["where"] == "store"
    assert compared["differ"] and not store.diff("half", "half")["differ"]


def test_adapters_are_packed_for_a_base_and_beside_it(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    file = write_lora(tmp_path / "ink.safetensors")
    create("tiny", tiny)
    create("ink", file, base="tiny")
    assert Store().show("ink")["subject"]["digest"] == Store().digest("tiny")
    create("both", base="tiny", loras=["ink", (str(file), 0.5)])
    uses = Store().show("both")["config"]["loras"]
    assert [use["strength"] for use in uses] == [1.0, 0.5]
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "needs a path"),
        ({"base": "tiny"}, "needs a path"),
        ({"loras": ["ink"]}, "needs a path"),
        ({"base": "tiny", "loras": ["ink"], "quantize": "int8"}, "without other options"),
        ({"base": "tiny", "loras": ["ink"], "license": "MIT"}, "without other options"),
        ({"path": file, "loras": ["ink"]}, "without a path"),
        ({"path": tiny, "base": "tiny"}, "only an adapter or a ControlNet"),
    ]
    for options, message in refused:
        with pytest.raises(UsageError, match=message):
            create("x", **options)
    with pytest.raises(NotFoundError):
        create("x", base="tiny", loras=["none"])


def test_values_have_short_names_in_an_interpreter(tmp_path: Path) -> None:
    shown = {
        repr(Picture(np.zeros((48, 64, 3), np.uint8), 7, {"prompt": "x"})),
        repr(Store(tmp_path)),
        repr(Registry("registry.example.com")),
        repr(Worker("gpu:11434", model="shapes")),
        repr(Answer("a" * 80, "", "stop", 7, 9)),
    }
    assert shown == {
        "<Picture 64x48, seed 7>",
        f"Store('{tmp_path}')",
        "Registry('registry.example.com')",
        "Worker('http://gpu:11434', model='shapes:latest')",
        f"<Answer '{'a' * 40}...', 9 tokens>",
    }
    assert str(Answer("text", "", "stop", 1, 1)) == "text"


def test_a_part_is_pulled(abridged: Path, registry: RealRegistry, tmp_path: Path) -> None:
    name = f"{registry.host}/api/part:v1"
    create(name, abridged)
    push(name)
    store = Store(tmp_path / "part")
    pull(name, store=store, include=["*.json"])
    with pytest.raises(NotFoundError):
        store.export(name, tmp_path / "out")


def test_an_account_is_used_for_its_registry(
    private_registry: RealRegistry, abridged: Path, tmp_path: Path
) -> None:
    host = private_registry.host
    name = f"{host}/api/private:v1"
    create(name, abridged)
    with pytest.raises(AImageError) as refused:
        push(name)
    assert refused.value.exit_code == 4
    account: Any = {"username": USER, "password": PASSWORD}
    digest = push(name, registry=Registry(host, **account))
    assert Registry(host, **account).digest("api/private:v1") == digest
    with pytest.raises(UsageError, match="is not in the registry"):
        push(name, registry=Registry("registry.example.com"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "no host"}, "invalid reference"),
        ({"host": "plain"}, "invalid registry host"),
        ({"host": "localhost:1", "username": "a"}, "belong together"),
    ],
)
def test_a_registry_with_wrong_arguments_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Registry(**arguments)


def test_a_model_generates_pictures(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    create("tiny", tiny)
    seen = []
    with load("tiny") as model:
        options: Any = {"width": 64, "height": 64, "steps": 1, "seed": 7, "n": 2}
        first, second = model.generate("x", **options, progress=lambda *c: seen.append(c))
    assert (first.seed, second.seed) == (7, 8)
    assert first.pixels.shape == (64, 64, 3) and first.facts["prompt"] == "x"
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert first.save(tmp_path / "a.png").read_bytes() == first.encode()
    assert first.save(tmp_path / "a.jpg").read_bytes()[:2] == b"\xff\xd8"
    with pytest.raises(UsageError, match=r"only \.png"):
        first.save(tmp_path / "a.gif")
    with pytest.raises(NotFoundError):
        load("nothing")


def test_a_picture_is_an_image_and_is_shown_by_a_notebook() -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    picture = Picture(pixels, 7, {"prompt": "x"})
    assert (np.asarray(picture.image) == pixels).all()
    shown: Any = picture
    file = PictureFile(shown._repr_png_(), 7, {})
    assert repr(file) == repr(picture) == "<Picture 6x4, seed 7>"
    assert (file.pixels == pixels).all() and file.encode() == picture.encode()


def test_a_model_uses_adapters(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    store, file = Store(tmp_path / "store"), str(write_lora(tmp_path / "ink.safetensors"))
    create("x", tiny, store=store)
    create("ink", file, store=store)
    with load("x", store=store) as model:
        made = [
            model.generate("a", width=32, height=32, steps=1, seed=1, loras=loras)[0]
            for loras in ((), [(file, 0.5)], [("ink", 0.5)], ["ink"], [("ink", 0.5), (file, -0.5)])
        ]
        with pytest.raises(NotFoundError, match="none"):
            model.generate("a", loras=["none"])
    plain, half, same, whole, none = (one.pixels for one in made)
    assert len({one.tobytes() for one in (plain, half, same, whole)}) == 3
    assert (half == same).all()
    assert abs(none.astype(int) - plain).max() <= 1  # two changes that cancel each other: rounded
    assert made[2].facts["loras"][0]["digest"] == store.digest("ink")


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Draw]:
    """Return a function that makes a picture of 48 x 32 pixels with the tiny model."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    place = tmp_path_factory.mktemp("drawing")
    store = Store(place / "store")
    create("x", TINY, store=store)
    create("union", write_file(place / "union.safetensors", tensors()), store=store)
    with load("x", store=store) as model:
        yield lambda **options: model.generate("a fox", seed=1, **options)[0]


IMAGE = np.random.default_rng(0).integers(0, 256, (34, 50, 3), np.uint8)
MASK = np.zeros((34, 50), bool)
MASK[:, :32] = True


def test_a_picture_begins_with_another(drawing: Draw, tmp_path: Path) -> None:
    seen = list[tuple[int, int]]()
    options: Any = {"steps": 2, "strength": 0.5}
    made = drawing(image=IMAGE, **options, progress=lambda *counts: seen.append(counts))
    assert made.pixels.shape == (32, 48, 3) and made.facts["strength"] == 0.5
    assert drawing(size="64x48", steps=1).pixels.shape == (48, 64, 3)
    assert seen == [(0, 2), (0, 1), (1, 1)]
    begun = Picture(IMAGE, 1, {})
    for same in (begun, begun.encode(), str(begun.save(tmp_path / "a.png")), tmp_path / "a.png"):
        assert (drawing(image=same, **options).pixels == made.pixels).all()
    assert (drawing(image=IMAGE, **options, fine=True).pixels != made.pixels).any()
    padded = drawing(image=IMAGE, width=32, height=32, fit="pad", **options)
    assert padded.pixels.shape == (32, 32, 3) and padded.facts["fit"] == "pad"


def test_a_picture_is_painted_in_a_mask(drawing: Draw) -> None:
    options: Any = {"image": IMAGE, "mask": MASK, "steps": 1}
    cropped = drawing(**options, crop=True, paste=True, feather=1).pixels
    assert cropped.shape == IMAGE.shape and (cropped[:, 36:] == IMAGE[:, 36:]).all()
    clear = np.dstack([IMAGE, np.uint8(255) * ~MASK])
    by_alpha = drawing(image=clear, mask="alpha", steps=1)
    white = np.where(MASK[..., None], np.uint8(255), IMAGE)
    assert (by_alpha.pixels == drawing(**{**options, "image": white}).pixels).all()
    assert by_alpha.facts["mask"] == "alpha"


def test_a_picture_becomes_larger(drawing: Draw) -> None:
    assert drawing(image=IMAGE, steps=1, expand=(0, 0, 14, 0)).pixels.shape == (34, 64, 3)
    large = drawing(image=IMAGE, steps=1, upscale=1.5, width=64, height=64)
    assert large.pixels.shape == (51, 75, 3) and large.facts["upscale"] == 1.5


def test_a_control_picture_guides(drawing: Draw) -> None:
    options: Any = {"control": IMAGE, "controlnet": "union", "steps": 1}
    guided, none = (drawing(**options, control_strength=one) for one in (1, 0))
    assert guided.pixels.shape == (32, 48, 3) and (guided.pixels != none.pixels).any()
    assert guided.facts["controlnet"].startswith("union@sha256:")


def test_guidance_is_limited(drawing: Draw) -> None:
    size: Any = {"width": 32, "height": 32, "steps": 1}
    guided = drawing(**size, guidance=4, negative="a dog")
    limited = drawing(**size, guidance=4, negative="a dog", cfg_normalization=0.5)
    assert (guided.pixels != limited.pixels).any() and limited.facts["cfg_normalization"] == 0.5


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"image": "no.png"}, NotFoundError, "no.png"),
        ({"image": b"text"}, UsageError, "the image is not a picture"),
        ({"image": np.zeros((4, 4, 3))}, UsageError, "the image is not a picture: an array of fl"),
        ({"image": IMAGE, "mask": MASK[1:]}, UsageError, "the mask has 50 x 33 pixels"),
        ({"references": [IMAGE]}, UsageError, "reference"),
        ({"size": "64"}, UsageError, 'size must be "auto" or WIDTHxHEIGHT'),
        ({"size": "64x72"}, UsageError, "size must have a height that is a multiple of 16"),
        ({"size": "64x64", "width": 32}, UsageError, "width is 32, but size is 64x64"),
        ({"references": [b"text"]}, UsageError, "the reference 1 is not a picture"),
        ({"mask": MASK}, UsageError, "mask requires an image"),
        ({"image": IMAGE, "expand": (0, 0, 8, 0), "width": 64}, UsageError, "determines the size"),
    ],
)
def test_pictures_that_are_refused(
    drawing: Draw, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        drawing(**options)


def test_a_missing_extra_is_reported() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('mlx', 'torch'))\n"
        "import clowder_aimage\n"
        "try: clowder_aimage.load('tiny')\n"
        "except clowder_aimage.AImageError as error: print(type(error).__name__, error)"
    )
    said = run([sys.executable, "-c", code], text=True).stdout
    assert said.startswith("UsageError") and "needs the extra [mlx]" in said


@pytest.mark.integration
def test_the_programs_of_the_page(registry: RealRegistry, tmp_path: Path) -> None:
    """One after the other, as a reader would run them."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = re.sub(r"<!-- python: worker -->\n```python\n", "```text\n", PAGE.read_text("utf-8"))
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    program = re.sub(r"localhost:\d+", registry.host, program)
    done = run([sys.executable, "-c", program], cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "circles.png").stat().st_size and (tmp_path / "exported").is_dir()
    assert done.stdout.splitlines()[-1].startswith("NotFoundError 3 ")


EVENT = b"x" * 10


@pytest.mark.parametrize(
    ("kinds", "done"),
    [
        (("plan", "start", "progress", "done"), 10),
        (("plan", "skip"), 10),
        (("plan", "progress"), 4),
        (("plan", "start", "progress", "progress"), 8),
        (("plan", "done"), 0),
    ],
)
def test_bytes_of_a_copy_are_counted_once(kinds: tuple[str, ...], done: int) -> None:
    counted = list[tuple[int, int]]()
    counter = ProgressCounter(lambda *counts: counted.append(counts))
    blob = Descriptor.of("application/x", EVENT)
    for kind in kinds:
        count = {"plan": 10, "progress": 4}.get(kind, 0)
        counter.on_event(CopyEvent(kind, None if kind == "plan" else blob, count))
    assert counted[-1] == (done, 10)


def test_a_bar_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal in (False, True):
        monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
        with count_progress(True, "packing") as counter:
            counter.begin(10)
            counter.advance(10)
        shown = capsys.readouterr()
        assert not shown.out and ("packing" in shown.err) == is_terminal
    with count_progress(False, "packing") as counter:
        counter.begin(10)
    assert not capsys.readouterr().err

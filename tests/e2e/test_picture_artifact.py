"""Pictures as artifacts: pushed, listed as referrers, begun with, replayed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx")

from PIL import Image, PngImagePlugin

from clowder_aimage.oci import Digest, mediatype
from clowder_aimage.validate import check, validate_layout
from tests.conftest import TINY
from tests.process import PROGRAM, Aimage, run
from tests.program import find_program
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.scripted_worker import Says, ScriptedWorker, event
from tests.store import copy_store

SMALL = ("--steps", 2, "--seed", 7, "--size", "32x32", "--local")
PICTURE = mediatype.AIMAGE_PICTURE


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the host of an ``aimage registry serve``, with the tiny model as ``team/x:v1``."""
    home = tmp_path_factory.mktemp("served")
    here = Aimage(home, home / "store")
    words = ("registry", "serve", "--addr", "127.0.0.1:0", "--log-level", "error")
    process = Aimage(home, home / "served").start(*words, is_shared=True)
    assert process.stdout is not None
    found = process.stdout.readline().strip().removeprefix("http://")
    here("create", f"{found}/team/x:v1", TINY, "--whole-files")
    here("push", f"{found}/team/x:v1")
    yield found
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, host: str) -> Path:
    """Return a home whose store has pulled the model."""
    home = tmp_path_factory.mktemp("first")
    Aimage(home, home / "store")("pull", f"{host}/team/x:v1")
    return home


@pytest.fixture
def here(aimage: Callable[..., Aimage], first: Path) -> Aimage:
    found = aimage()
    copy_store(first / "store", found.store)
    return found


def picture(path: Path, colour: str = "red", size: tuple[int, int] = (32, 32)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path


def made(here: Aimage, model: str, target: str, *words: object) -> dict[str, Any]:
    done = here("run", model, "a fox", *SMALL, "-o", "out/", "--push", target, *words, "--json")
    value: dict[str, Any] = json.loads(done.out)
    return value


def test_pictures_are_pushed_with_their_settings_and_their_model(here: Aimage, host: str) -> None:
    model, target = f"{host}/team/x:v1", f"{host}/team/x:two"
    value = made(here, model, target, "-n", 2)
    digest = value["pushed"]["digest"]
    assert value["pushed"]["reference"] == f"{target}@{digest}"
    there = Aimage(here.home, here.home / "other")
    there("pull", target)
    manifest = json.loads(there("manifest", "fetch", target).out)
    assert manifest["artifactType"] == PICTURE
    assert manifest["subject"]["digest"] == value["digest"]
    titles = [layer["annotations"][mediatype.TITLE] for layer in manifest["layers"]]
    assert titles == ["7.png", "8.png"]
    assert {layer["mediaType"] for layer in manifest["layers"]} == {"image/png"}
    files = [Path(here.home, one["path"]).read_bytes() for one in value["pictures"]]
    assert [layer["digest"] for layer in manifest["layers"]] == [
        str(Digest.of(data)) for data in files
    ]
    documents = validate_layout(there.store)
    assert [one for one in documents if one.violations or one.note] == []
    assert "picture-config" in {one.schema for one in documents}
    listed = here("referrers", model, "--type", PICTURE, "--json").out
    assert digest in listed
    assert here("attach", "--get", f"{target}", "-o", "got").out.split() == [
        "got/7.png",
        "got/8.png",
    ]


def test_the_same_pictures_are_the_same_artifact(here: Aimage, host: str) -> None:
    found = {
        made(here, f"{host}/team/x:v1", f"{host}/team/x:{tag}")["pushed"]["digest"]
        for tag in ("same-1", "same-2")
    }
    assert len(found) == 1


def test_a_picture_of_an_artifact_is_replayed(here: Aimage, host: str) -> None:
    model, target = f"{host}/team/x:v1", f"{host}/team/pics:replayed"
    pushed = made(here, model, target, "-n", 2)["pushed"]["reference"]
    done = here("replay", f"oci://{target}#8.png", "--json")
    assert json.loads(done.out)["equal"] is True
    assert here("replay", f"oci://{pushed}#7.png").line == "equal"
    assert "several pictures: '7.png', '8.png'" in here("replay", f"oci://{target}", code=2).err
    other = Aimage(here.home, here.home / "other")  # it pulls the model too
    assert other("replay", f"oci://{target}#8.png").line == "equal"


@pytest.mark.parametrize(("suffix", "kind"), [("jpg", "jpeg"), ("webp", "webp")])
def test_a_picture_of_a_lossy_format_is_replayed(
    here: Aimage, host: str, suffix: str, kind: str
) -> None:
    model, target = f"{host}/team/x:v1", f"{host}/team/pics:{suffix}"
    path = here.home / f"fox.{suffix}"
    here("run", model, "a fox", *SMALL, "-o", path, "--push", target)
    manifest = json.loads(here("manifest", "fetch", target).out)
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == f"image/{kind}"
    assert layer["annotations"][mediatype.TITLE] == f"7.{suffix}"
    for name in (path, f"oci://{target}"):
        assert here("replay", name).line == "equal"
    with Image.open(path) as image:
        image.rotate(180).save(path, exif=image.getexif())
    assert "differs: by up to" in here("replay", path, code=5).out


def test_a_picture_begins_with_one_of_an_artifact(here: Aimage, host: str) -> None:
    model, target = f"{host}/team/x:v1", f"{host}/team/pics:begun"
    value = made(here, model, target)
    by_file = made(here, model, f"{host}/team/pics:b1", "--image", value["pictures"][0]["path"])
    by_artifact = made(here, model, f"{host}/team/pics:b2", "--image", f"oci://{target}")
    assert by_file["pushed"]["digest"] == by_artifact["pushed"]["digest"]
    assert by_file["image"] == by_artifact["image"]


def test_a_picture_that_is_refused_leaves_nothing(here: Aimage, host: str) -> None:
    model = f"{host}/team/x:v1"
    (here.home / "text.png").write_text("text")
    picture(here.home / "image.png")
    picture(here.home / "wide.png", "white", (40, 32))
    words = ("attach", model, "text.png", "image.png", "wide.png", "--type", "application/x.test")
    name = f"oci://{host}/team/x@{here(*words, '-q').line}"
    before = sorted(here.store.rglob("*"))
    for options, code, said in (
        (("--image", f"{name}#text.png"), 2, "is not a picture that can be read"),
        (("--image", f"{name}#none.png"), 3, "has no picture 'none.png'"),
        (("--image", f"{name}#image.png", "--mask", f"{name}#wide.png"), 2, "the mask has 40 x 32"),
        (("--image", f"{name}#image.png", "--mask", "alpha"), 2, "has no transparency"),
    ):
        assert said in here("run", model, "a fox", *SMALL, *options, code=code).err
    assert sorted(here.store.rglob("*")) == before


def test_a_replay_needs_what_the_picture_began_with(here: Aimage, host: str) -> None:
    """It is in the store, or given; otherwise its digest is named."""
    image, mask = picture(here.home / "a.png"), picture(here.home / "m.png", "white")
    model, target = f"{host}/team/x:v1", f"{host}/team/pics:masked"
    value = made(here, model, target, "--image", image, "--mask", mask)
    assert here("replay", f"oci://{target}").line == "equal"
    other = Aimage(here.home, here.home / "other")
    other("pull", model)
    failed = other("replay", value["pictures"][0]["path"], code=3).err
    assert f"lacks: the image {value['image']} and the mask {value['mask']}" in failed
    failed = other("replay", f"oci://{target}", "--image", image, code=3).err
    assert f"lacks: the mask {value['mask']}" in failed
    wrong = picture(here.home / "wrong.png", "blue")
    failed = other("replay", f"oci://{target}", "--image", wrong, "--mask", mask, code=5).err
    assert "is not the image that was used" in failed
    both = ("--image", image, "--mask", mask)
    assert other("replay", f"oci://{target}", *both).line == "equal"
    made(here, model, f"{host}/team/pics:plain")
    assert (
        "was made without one"
        in here("replay", f"oci://{host}/team/pics:plain", "--mask", mask, code=2).err
    )


def test_the_config_is_valid_and_names_the_inputs(here: Aimage, host: str) -> None:
    image = picture(here.home / "a.png")
    target = f"{host}/team/pics:config"
    value = made(here, f"{host}/team/x:v1", target, "--image", image)
    there = Aimage(here.home, here.home / "other")
    there("pull", target)
    config = json.loads(there("manifest", "fetch", target).out)["config"]
    assert config["mediaType"] == mediatype.AIMAGE_PICTURE_CONFIG
    raw = there.store / "blobs/sha256" / config["digest"].removeprefix("sha256:")
    assert check("it", raw.read_bytes(), "picture-config").violations == []
    document = json.loads(raw.read_bytes())
    assert document["settings"]["image"] == str(Digest.of(image.read_bytes())) == value["image"]
    assert document["pictures"][0]["seed"] == 7
    assert "seed" not in document["settings"]


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("--push", "pictures:v1"), 2, "has no registry host"),
        (("--push", "HOST/team/x@sha256:" + "0" * 64), 2, "pushed by tag"),
        (("--push", "HOST/Team/x"), 2, "invalid"),
        (("--push", "127.0.0.1:1/team/x:v1"), 1, "127.0.0.1:1"),
    ],
)
def test_a_name_that_cannot_be_pushed_is_refused_at_once(
    here: Aimage, host: str, words: tuple[str, ...], code: int, error: str
) -> None:
    words = tuple(word.replace("HOST", host) for word in words)
    done = here("run", "none:v1", "a fox", *SMALL, "-o", "made.png", *words, code=code)
    assert error in done.err
    assert not (here.home / "made.png").exists()


def test_a_push_replaces_pictures_and_nothing_else(here: Aimage, host: str) -> None:
    model, target = f"{host}/team/x:v1", f"{host}/team/x:again"
    made(here, model, target)
    made(here, model, target, "--image", picture(here.home / "a.png"))
    before = here("resolve", model).line
    words = ("run", "none:v1", "a fox", *SMALL, "-o", "made.png", "--push", model)
    assert "is not an artifact of pictures" in here(*words, code=2).err  # before all else
    assert here("resolve", model).line == before


@pytest.mark.parametrize("refused", ["GET", "POST", "PUT"])
def test_a_push_that_a_registry_refuses_is_found_early_if_it_says_so(
    here: Aimage, host: str, refused: str
) -> None:
    """A push that fails later keeps the files."""

    def script(seen: Seen) -> Answer:
        if seen.method == refused:
            return Answer(403, {}, b"{}")
        if seen.method in ("GET", "HEAD"):
            return Answer(404)
        return Answer(202, {"Location": "/v2/team/x/blobs/uploads/1"})

    with ScriptedRegistry(script).running() as registry:
        words = ("-o", "made.png", "--push", f"{registry.host}/team/x:v1")
        failed = here("run", f"{host}/team/x:v1", "a fox", *SMALL, *words, code=4).err
    assert registry.host in failed
    assert (here.home / "made.png").exists() == (refused == "PUT") == ("rendering" in failed)
    begun = [seen.method for seen in registry.seen][:3]
    assert begun == (["GET", "POST", "DELETE"] if refused == "PUT" else begun)


def test_the_name_of_pushed_pictures_is_on_stderr_if_stdout_has_the_picture(
    here: Aimage, host: str
) -> None:
    """Also with ``-q``: it is the result."""
    name, target = f"{host}/team/x:v1", f"{host}/team/pics:stdout"
    facts = {"reference": name, "digest": here("resolve", name).line, "seed": 7}
    buffer, info = io.BytesIO(), PngImagePlugin.PngInfo()
    info.add_itxt("aimage", json.dumps(facts))
    Image.new("RGB", (16, 16)).save(buffer, "PNG", pnginfo=info)
    sent = {"data": [{"b64_json": base64.b64encode(buffer.getvalue()).decode()}]}
    with ScriptedWorker(lambda _: Says([event("done", sent)])).running() as worker:
        words = ("run", name, "a fox", "--seed", "7", "-q", "-o", "-", "--push", target)
        environment = here.env() | {"AIMAGE_HOST": worker.host}
        ended = run([*PROGRAM, *words], env=environment, cwd=here.home)
    assert ended.stdout == buffer.getvalue()
    assert ended.stderr.decode() == f"{target}@{here('resolve', target).line}\n"


def test_an_unreachable_registry_is_found_early(here: Aimage, host: str) -> None:
    words = ("-o", "made.png", "--push", "127.0.0.1:1/team/x:v1")
    done = here("run", f"{host}/team/x:v1", "a fox", *SMALL, *words, code=1)
    assert "127.0.0.1:1" in done.err
    assert not (here.home / "made.png").exists()


@pytest.mark.integration
def test_other_tools_read_the_artifact(
    here: Aimage, host: str, registry: RealRegistry, repository: str
) -> None:
    """It is in a registry without the referrers API, which lists it by its fallback tag."""
    find_program("skopeo")
    here("copy", f"{host}/team/x:v1", f"{repository}:v1")
    here("pull", f"{repository}:v1")
    value = made(here, f"{repository}:v1", f"{repository}:pictures", "-n", 2)
    copied = here.home / "copied"
    words = ["skopeo", "copy", "--src-tls-verify=false", f"docker://{repository}:pictures"]
    run([*words, f"oci:{copied}:it"], check=True)
    index = json.loads((copied / "index.json").read_bytes())
    assert index["manifests"][0]["digest"] == value["pushed"]["digest"]
    assert value["pushed"]["digest"] in here("referrers", f"{repository}:v1", "--json").out
    assert here("replay", f"oci://{repository}:pictures#8.png").line == "equal"

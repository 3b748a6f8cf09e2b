"""Reference pictures on the command line, with a small FLUX.2."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clowder_aimage.oci import Digest
from clowder_aimage.pictures.artifact import encode_picture_config
from clowder_aimage.pictures.generated_picture import GeneratedPicture
from clowder_aimage.validate import check
from tests.picture_file import load_picture
from tests.process import Aimage
from tests.store import copy_store

RUN = ("run", "flux", "put both in one picture", "--seed", 3, "--steps", 1, "--local")
BOTH = ("--image", "a.png", "--image", "b.png")


@pytest.fixture(scope="module")
def stored(flux2_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Aimage:
    """Return a command line with the model as ``flux``, and two pictures."""
    home = tmp_path_factory.mktemp("flux")
    here = Aimage(home, home / "store")
    copy_store(flux2_store, here.store)
    random = np.random.default_rng(0)
    for name, (width, height) in {"a": (80, 96), "b": (64, 70)}.items():
        values = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(values).save(home / f"{name}.png")
    return here


@pytest.fixture(scope="module")
def made(stored: Aimage) -> Path:
    """Return a picture that is made of both."""
    stored(*RUN, *BOTH, "-o", "both.png", "-q")
    return stored.home / "both.png"


def digest(path: Path) -> str:
    return str(Digest.of(path.read_bytes()))


def test_a_picture_states_its_references_and_has_the_size_of_the_first(
    stored: Aimage, made: Path
) -> None:
    pixels, facts = load_picture(made)
    assert pixels.shape == (96, 80, 3)
    assert facts["references"] == [digest(stored.home / f"{name}.png") for name in "ab"]
    assert not {"image", "strength", "fit"} & facts.keys()
    assert stored("replay", made).out == "equal\n"
    config = encode_picture_config(
        [GeneratedPicture(made.read_bytes(), 3, "png", facts)]
    )  # of --push
    assert json.loads(config)["settings"]["references"] == facts["references"]
    assert check("it", config, "picture-config").violations == []


def test_one_image_is_a_reference_too(stored: Aimage, made: Path) -> None:
    stored(*RUN, "--image", "a.png", "--size", "32x32", "-o", "one.png", "-q")
    pixels, facts = load_picture(stored.home / "one.png")
    assert pixels.shape == (32, 32, 3)
    assert facts["references"] == [digest(stored.home / "a.png")]


def test_replay_names_references_that_are_missing(stored: Aimage, made: Path) -> None:
    here = Aimage(stored.home, stored.home / "other")
    copy_store(stored.store, here.store)
    one, other = (digest(stored.home / f"{name}.png") for name in "ab")
    for each in (one, other):
        (here.store / "blobs/sha256" / each.partition(":")[2]).unlink()
    said = here("replay", made, code=3).err
    assert f"the image {one} and the image {other}" in said
    assert "name them with --image SOURCE and --image SOURCE" in said
    said = here("replay", made, "--image", "b.png", code=3).err
    assert f"lacks: the image {one}\n" in said
    said = here("replay", made, "--image", made, code=5).err
    assert f"not {one} or {other}" in said
    assert here("replay", made, "--image", "b.png", "--image", "a.png").out == "equal\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image", "a.png", "--strength", 0.5), "strength cannot be used: Flux2KleinPipeline"),
        (("--image", "a.png", "--mask", "a.png"), "mask cannot be used: Flux2KleinPipeline"),
        (("--control", "a.png"), "control cannot be used: Flux2KleinPipeline only edits pictures"),
        ((*BOTH, "--upscale", 2), "--upscale applies to one --image: several are edited"),
        ((*BOTH, *BOTH, "--image", "a.png"), "--image is given 5 times: at most 4 pictures"),
        ((*BOTH, "--image", "-", "--image", "-"), "--image and --image read stdin"),
        (("--strength", 0.5), "strength requires an image"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    stored: Aimage, options: tuple[object, ...], message: str
) -> None:
    before = {path.name for path in (stored.store / "blobs/sha256").iterdir()}
    said = stored(*RUN, *options, code=2).err
    assert said.startswith(f"aimage: {message}")
    assert before == {path.name for path in (stored.store / "blobs/sha256").iterdir()}


def test_several_images_are_refused_by_a_model_that_begins_with_one(
    stocked: Callable[[], Aimage], stored: Aimage
) -> None:
    here, paths = stocked(), [stored.home / f"{name}.png" for name in "ab"]
    both = [word for path in paths for word in ("--image", path)]
    said = here("run", "x", "a fox", *both, "--local", code=2).err
    assert "must be one picture, not 2: ZImagePipeline begins with one" in said
    assert not any((here.store / "blobs/sha256" / digest(path)[7:]).exists() for path in paths)


def test_a_large_reference_gives_a_megapixel(stored: Aimage) -> None:
    Image.new("L", (6000, 1000), 90).save(stored.home / "wide.png")
    said = stored(*RUN, "--image", "wide.png", "--guidance", 4, code=2).err
    assert "--image: wide.png has 6000 x 1000 pixels, and is reduced to 2496x416; --size" in said


def test_sheets_of_seeds(stored: Aimage) -> None:
    options = ("--size", "32x32", "--seeds", "1..2", "--sheet", "-o", "sheet/", "--json")
    run = ("run", "flux", "both", "--steps", 1, "--local")
    value = json.loads(stored(*run, *BOTH, *options).out)
    assert [one["seed"] for one in value["pictures"]] == [1, 2] and value["sheet"]


def test_the_references_of_a_prompt_loop_are_set(
    stored: Aimage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(stored.home / "b.png", stored.home / "my b.png")
    lines = iter(["/set image a.png 'my b.png'", "a fox", "/set image my b.png", "/again"])

    def typed(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", typed)
    monkeypatch.setattr("clowder_aimage.cli.verbs.run.read_prompt", lambda _: None)
    value = stored("run", "flux", *RUN[3:], "--size", "32x32", "-o", "loop/")
    found = [load_picture(stored.home / path)[1]["references"] for path in value.out.split()]
    one, other = (digest(stored.home / f"{name}.png") for name in "ab")
    assert found == [[one, other], [other]]

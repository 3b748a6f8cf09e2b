"""Pictures that begin with pictures on the command line: larger ones, seeds, sheets, warnings."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest
from PIL import Image

from clowder_aimage.cli.console.named_picture import NamedPictures
from tests.conftest import TINY
from tests.picture_file import load_picture
from tests.process import Aimage

SIZE = ("--size", "32x32", "--steps", 4, "--seed", 3, "--local")


@pytest.fixture
def drawn(stocked: Callable[[], Aimage]) -> tuple[Aimage, Path]:
    """Return a command line with the tiny model, and a picture of 40 x 24 pixels."""
    here = stocked()
    values = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    path = here.home / "drawn.png"
    Image.fromarray(values).save(path)
    return here, path


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_expand_keeps_the_picture_and_paints_around_it(drawn: tuple[Aimage, Path]) -> None:
    here, path = drawn
    options = ("--image", path, "--expand", "8,0,16,4", "--steps", 2, "--seed", 1, "--local")
    here("run", "x", "a fox", *options, "-o", "wide.png")
    made, given = pixels(here.home / "wide.png"), pixels(path)
    assert made.shape == (28, 64, 3)
    inside = made[:18, 8 + 10 : 48 - 10]  # without the seams, a quarter of each side
    assert np.array_equal(inside, given[:18, 10:30])
    edge = np.repeat(made[:20, 55:56], 9, axis=1)
    assert np.abs(made[:20, 55:] - edge).max() > 3  # painted, not the padding
    _, facts = load_picture(here.home / "wide.png")
    assert (facts["expand"], facts["strength"]) == ([8, 0, 16, 4], 1.0)
    assert (facts["width"], facts["height"]) == (64, 32)
    assert here("replay", "wide.png").out == "equal\n"


def test_upscale_keeps_the_picture_in_larger(drawn: tuple[Aimage, Path]) -> None:
    here, path = drawn
    options = ("--image", path, "--upscale", 2, "--steps", 4, "--seed", 1, "--local")
    here("run", "x", "a fox", *options, "--size", "64x32", "-o", "large.png")
    assert pixels(here.home / "large.png").shape == (48, 80, 3)
    _, facts = load_picture(here.home / "large.png")
    assert (facts["upscale"], facts["strength"]) == (2, 0.2)
    assert (facts["width"], facts["height"]) == (64, 32)
    assert here("replay", "large.png").out == "equal\n"


def test_replay_names_an_image_that_is_missing(drawn: tuple[Aimage, Path]) -> None:
    here, path = drawn
    options = ("--image", path, "--expand", "0,0,8,0", "--steps", 1, "--seed", 1, "--local")
    here("run", "x", "a fox", *options, "-o", "wide.png")
    digest = load_picture(here.home / "wide.png")[1]["image"]
    (here.store / "blobs" / "sha256" / digest.partition(":")[2]).unlink()
    said = here("replay", "wide.png", code=3).err
    assert f"pictures that the store lacks: the image {digest}" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--expand", "0,0,8,0"), "expand requires an image"),
        (("--upscale", 2), "upscale requires an image"),
        (
            ("--image", "drawn.png", "--expand", "8,8,8"),
            "expand must be 4 whole numbers",
        ),
        (
            ("--image", "drawn.png", "--expand", "8,8,8,-1"),
            "from 0 to 4096, not -1",
        ),
        (("--image", "drawn.png", "--expand", "0,0,0,9999"), "from 0 to 4096"),
        (("--image", "drawn.png", "--expand", "0,0,8,0", "--mask", "drawn.png"), "with a mask"),
        (("--image", "drawn.png", "--expand", "0,0,8,0", "--size", "64x64"), "omit --size"),
        (("--image", "drawn.png", "--upscale", 2, "--mask", "alpha"), "combined with a mask"),
        (("--image", "drawn.png", "--upscale", 2, "--expand", "0,0,8,0"), "with expand"),
        (("--image", "drawn.png", "--upscale", 5), "upscale must be a number from 1 to 4, not 5"),
        (("--image", "drawn.png", "--strength", 1e-17), "leaves none of 8 steps"),
        (("--seeds", "1..2", "--seed", 1), "--seeds cannot be combined with --seed"),
        (("--seeds", "1..2", "-n", 2), "--seeds cannot be combined with -n"),
        (("--seeds", "2..1"), "in rising order"),
        (("--seeds", "a"), "expected seeds such as 1..16"),
        (("--seeds", "1..9999"), "more than 1024 seeds"),
        (("--seeds", "1,18446744073709551616"), "from 0 to 2^64 - 1"),
        (("--seeds", "1..2", "-o", "-"), "-o - writes one picture"),
        (("--seeds", "1", "--sheet", "-o", "-"), "--sheet cannot be combined with -o -"),
    ],
)
def test_mistakes_are_refused(
    drawn: tuple[Aimage, Path], options: tuple[object, ...], message: str
) -> None:
    here, _ = drawn
    shutil.rmtree(here.store)  # no model is looked for
    said = here("run", "x", "a fox", *options, "--local", code=2)
    assert message in said.err.replace("\n", " ")
    assert [path.name for path in here.home.glob("*.png")] == ["drawn.png"]


@pytest.fixture
def refusing(aimage: Callable[[], Aimage]) -> Aimage:
    """Return a command line with a store that does not exist, and files that are refused."""
    here = aimage()
    values = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(values).save(here.home / "a.png")
    Image.new("L", (40, 24)).save(here.home / "black.png")
    Image.new("L", (24, 40), 255).save(here.home / "other.png")
    (here.home / "text.png").write_text("a fox")
    (here.home / "folder").mkdir()
    return here


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--image", "text.png"), 2, "--image: text.png is not a picture that can be read"),
        (("--image", "none.png"), 3, "--image: there is no file none.png"),
        (("--image", "folder"), 2, "--image: folder is a directory, not a picture"),
        (("--image", ""), 2, "--image names no picture"),
        (("--image", "a.png", "--mask", "other.png"), 2, "--mask: other.png: the mask has 24 x 40"),
        (("--image", "a.png", "--mask", "black.png"), 2, "--mask: black.png: the mask is empty"),
        (
            ("--image", "a.png", "--mask", "alpha"),
            2,
            "--mask: a.png: the image has no transparency",
        ),
        (("--control", "text.png"), 2, "--control: text.png is not a picture"),
        (
            ("--image", "a.png", "--mask", "a.png", "--control", "other.png", "--crop"),
            2,
            "--control: other.png has 24 x 40 pixels, the image has 40 x 24",
        ),
        (("--image", "-", "--mask", "-"), 2, "--image and --mask read stdin"),
        (("--image", "-", "--password-stdin"), 2, "--image and --password-stdin read stdin"),
        (("--image", "data:text/html;base64,PNG"), 2, "--image has the type 'text/html'"),
    ],
)
def test_pictures_are_refused_by_their_names_before_anything_is_stored(
    refusing: Aimage, options: tuple[object, ...], code: int, message: str
) -> None:
    if "text/html" in str(options):
        data = base64.b64encode((refusing.home / "a.png").read_bytes()).decode()
        options = ("--image", f"data:text/html;base64,{data}")
    said = refusing("run", "x", "a fox", *options, "--local", code=code)
    assert message in said.err.replace("\n", " ")
    assert not refusing.store.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "the prompt is missing"), (("-",), "PROMPT and --image read stdin")],
)
def test_a_picture_on_stdin_is_not_the_prompt(
    refusing: Aimage, words: tuple[str, ...], message: str
) -> None:
    assert message in refusing("run", "x", *words, "--image", "-", code=2).err


def test_what_the_model_does_not_see_is_said(drawn: tuple[Aimage, Path]) -> None:
    here, path = drawn
    picture = Image.open(path).convert("RGBA")
    picture.putpixel((0, 0), (1, 2, 3, 0))
    picture.save(path)
    run = here("run", "x", "x" * 600, *SIZE, "--image", "drawn.png", "-o", "a.png")
    assert "of which the model reads the first 512: the rest has no effect" in run.err
    assert "warning: --image: drawn.png has transparent parts, which are white for the" in run.err
    assert "; --mask alpha paints them\n" in run.err
    assert here("replay", "a.png").out == "equal\n"
    run = here("run", "x", "a fox", *SIZE, "--image", "drawn.png", "--mask", "alpha", code=2)
    assert "too small" in run.err and "white" not in run.err


def test_a_large_photograph_is_reduced_and_said(drawn: tuple[Aimage, Path]) -> None:
    here, _ = drawn
    Image.new("L", (6000, 1000), 90).save(here.home / "wide.png")
    Image.new("L", (6000, 1000), 255).save(here.home / "white.png")
    base = ("--image", "wide.png", "--negative", "an owl", "--local")  # needs guidance
    reduced = "--image: wide.png has 6000 x 1000 pixels, and is reduced to 5008x832; --size sets"
    for options, is_said in (
        ((), True),
        (("--size", "64x32"), False),
        (("--mask", "white.png", "--crop"), False),
        (("--upscale", 2), False),
    ):
        assert (reduced in here("run", "x", "a fox", *base, *options, code=2).err) == is_said


@pytest.mark.parametrize(
    ("options", "is_ignored"),
    [
        (("--steps", 4, "--strength", 0.8), True),
        (("--steps", 4, "--strength", 0.75), False),
        (("--steps", 4, "--strength", 0.8, "--fine"), False),
        (("--steps", 4, "--strength", 0.95, "--fine"), True),
        (("--steps", 1), True),
        (("--strength", 0.9), True),  # of the model's 8 steps
        (("--steps", 2, "--mask", "drawn.png"), False),
        (("--steps", 2, "--expand", "0,0,8,0"), False),
    ],
)
def test_an_image_that_is_ignored_is_said_before_the_model_is_loaded(
    drawn: tuple[Aimage, Path], options: tuple[object, ...], is_ignored: bool
) -> None:
    here, path = drawn
    said = here("run", "x", "a fox", "--image", path, *options, "--local", "-o", "made.png").err
    assert ("so the image is ignored" in said) == is_ignored
    if is_ignored:
        assert said.index("image is ignored") < said.index("rendering")
        assert ("0.8 or more steps\n" in said) == ("--fine" in options)


def test_a_mask_without_a_cell_is_refused_before_the_load(drawn: tuple[Aimage, Path]) -> None:
    here, path = drawn
    mask = np.zeros((24, 40), np.uint8)
    mask[1:6, 1:6] = 255  # beside the first pixels of cells
    Image.fromarray(mask).save(here.home / "mask.png")
    options = ("--image", path, "--mask", "mask.png", "--seeds", "1..2", "--local", "-v")
    before = set((here.store / "blobs").rglob("*"))
    said = here("run", "x", "a fox", *options, code=2).err
    assert "the mask is too small: it covers no cell of 8 x 8 pixels" in said
    assert "memory:" not in said  # which is said after a load
    assert set((here.store / "blobs").rglob("*")) == before


def test_seeds_make_a_picture_each_and_a_sheet(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    small = ("--size", "32x48", "--steps", 1, "--local")
    said = here("run", "x", "two foxes", *small, "--seeds", "7,1..2,4", "--sheet", "--json")
    found = json.loads(said.out)
    assert [one["seed"] for one in found["pictures"]] == [7, 1, 2, 4]
    assert [one["path"] for one in found["pictures"]] == [
        f"two-foxes-{seed}.png" for seed in (7, 1, 2, 4)
    ]
    assert found["sheet"] == "two-foxes-sheet.png"
    here("run", "x", "two foxes", *small, "--seed", 2, "-o", "alone.png")
    assert np.array_equal(pixels(here.home / "alone.png"), pixels(here.home / "two-foxes-2.png"))
    sheet = pixels(here.home / "two-foxes-sheet.png")
    assert sheet.shape == (8 + 2 * (48 + 18 + 8), 8 + 2 * (32 + 8), 3)
    third = sheet[8 + 74 : 8 + 74 + 48, 8:40]
    assert np.array_equal(third, pixels(here.home / "two-foxes-2.png"))
    caption = sheet[8 + 48 + 1 : 8 + 48 + 18, 8:40]
    assert caption.min() < 100 < caption.max()


def test_a_sheet_is_beside_the_named_file(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    small = ("--size", "32x32", "--steps", 1, "--local")
    said = here("run", "x", "foxes", *small, "--seeds", "1,3", "--sheet", "-o", "a.jpg")
    assert said.out.split() == ["a-1.jpg", "a-2.jpg", "a-sheet.png"]
    assert {path.name for path in here.home.glob("a*")} == {"a-1.jpg", "a-2.jpg", "a-sheet.png"}


def test_options_of_guidance_without_guidance_are_said(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    small = ("--size", "32x32", "--steps", 1, "--seed", 1, "--local", "-o", "a.png")
    said = here("run", "x", "a fox", *small, "--cfg-truncation", 0.5, "--cfg-normalization", 1).err
    assert "warning: guidance_end has no effect without guidance" in said
    assert "warning: cfg_normalization has no effect without guidance" in said
    assert "negative requires" in here("run", "x", "a", *small, "--negative", "b", code=2).err
    here("create", "guided", TINY, "--guidance", 2)
    given = ("--negative", "red", "--cfg-normalization", 1)
    assert "no effect" not in here("run", "guided", "a fox", *small, *given).err
    off = here("run", "guided", "a fox", *small, *given, "--guidance", 0, code=2)
    assert "negative requires guidance above 0" in off.err


def test_a_file_that_has_changed_between_prompts_is_read_again(refusing: Aimage) -> None:
    with click.Context(click.Command("run")):
        files, path = NamedPictures(), refusing.home / "a.png"
        first = files.read(str(path), "--image")
        assert files.read(str(path), "--image") is first
        Image.new("RGB", (8, 8)).save(path)
        assert files.read(str(path), "--image").width == 8

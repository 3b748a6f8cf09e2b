"""The verbs on a local store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.process import Aimage


def test_stdout_is_only_the_digest(aimage: Callable[..., Aimage], tiny: Path) -> None:
    done = aimage()("create", "x", tiny)
    assert done.line.startswith("sha256:")
    assert "284 tensors" in done.err
    assert "0 of 293 blobs" in done.err


def test_quiet_prints_nothing(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    assert here("create", "x", tiny, "--whole-files", "-q").err == ""
    assert here("-q", "create", "y", tiny, "--whole-files").err == ""


def test_common_options_are_accepted_before_and_after_the_verb(
    aimage: Callable[..., Aimage], tiny: Path
) -> None:
    here = aimage()
    elsewhere = here.home / "elsewhere"
    here("--store", elsewhere, "create", "x", tiny, "--whole-files")
    assert not here.store.exists()
    for arguments in (
        ("--json", "--store", elsewhere, "ls"),
        ("ls", "--json", "--store", elsewhere),
        ("--json", "ls", "--store", elsewhere),
        ("--store", here.home / "not-this-one", "--json", "ls", "--store", elsewhere),
    ):
        assert [row["reference"] for row in here(*arguments).value] == ["x:latest"]


def test_the_default_store_is_the_platform_s_data_directory(
    aimage: Callable[..., Aimage], tiny: Path
) -> None:
    here = aimage()
    here.environment["AIMAGE_STORE"] = ""
    here("create", "x", tiny, "--whole-files")
    assert (here.home / "data" / "aimage" / "index.json").is_file()


def test_create_defaults_to_the_current_directory(
    aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path
) -> None:
    here = aimage()
    plain = here("create", "x", tiny).line
    here.home = tiny
    here.environment["HOME"] = str(tmp_path)
    assert here("create", "x").line == plain


def test_the_created_time_is_only_set_when_given(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    plain = here("create", "x", tiny, "--whole-files").line
    here.environment["SOURCE_DATE_EPOCH"] = "1700000000"
    dated = here("create", "x", tiny, "--whole-files").line
    assert here("show", "x", "--json").value["config"]["created"] == "2023-11-14T22:13:20Z"
    del here.environment["SOURCE_DATE_EPOCH"]
    assert (
        here("create", "x", tiny, "--whole-files", "--created", "2023-11-14T23:13:20+01:00").line
        == dated
    )
    assert here("create", "x", tiny, "--whole-files").line == plain != dated
    for nonsense in ("yesterday", "2023-11-14T22:13:20", "2023"):
        assert (
            "--created"
            in here("create", "x", tiny, "--whole-files", "--created", nonsense, code=2).err
        )


def test_create_stores_license_source_and_defaults(
    aimage: Callable[..., Aimage], tiny: Path
) -> None:
    here = aimage()
    here("create", "x", tiny, "--license", "MIT", "--source", "https://example.com/model",
         "--steps", "9", "--guidance", "4")  # fmt: skip
    config = here("show", "x", "--json").value["config"]
    assert (config["license"], config["source"]) == ("MIT", "https://example.com/model")
    assert config["defaults"] == {"width": 64, "height": 64, "steps": 9, "guidance": 4}
    assert "defaults    width 64, height 64, steps 9, guidance 4\n" in here("show", "x").out


def test_show_prints_a_model(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    digest = here("create", "x", tiny).line
    value = here("show", "x", "--json").value
    assert value["digest"] == digest
    assert value["dialect"] == "clowder"
    assert value["config"]["family"] == "z-image"
    assert len(value["layers"]) == 293
    assert value["size"] == sum(layer["size"] for layer in value["layers"])
    text = here("show", "x", "--layers").out
    assert digest in text
    assert "transformer/" in text
    assert "293 layers" in text


def test_ls_tag_and_rm(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    assert here("ls", "--json").value == []
    digest = here("create", "x", tiny, "--whole-files").line
    assert here("tag", "x", "localhost:5000/team/x:v1").line == digest
    names = [row["reference"] for row in here("ls", "--json").value]
    assert names == ["localhost:5000/team/x:v1", "x:latest"]
    assert here("rm", "x").line == "x:latest"
    assert here("show", "x", code=3).out == ""
    assert here("show", f"localhost:5000/team/x@{digest}", "--json").value["digest"] == digest
    assert "localhost:5000/team/x:v1" in here("ls").out


def test_run_writes_images(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    here("create", "team/x:v2", tiny, "--whole-files")
    done = here("run", "team/x:v2", "a fox", "--seed", 5, "--steps", 1, "-n", 2, "--json")
    paths = [picture["path"] for picture in done.value["pictures"]]
    assert "loading 1." in done.err
    assert paths == ["a-fox-5.png", "a-fox-6.png"]
    with Image.open(here.home / "a-fox-5.png") as picture:
        assert picture.size == (64, 64)  # the model's default size
        facts = json.loads(picture.info["aimage"])
        assert picture.info["Description"] == "a fox"
    assert facts["prompt"] == "a fox"
    assert facts["seed"] == 5
    assert facts["steps"] == 1
    assert facts["digest"] == here("show", "team/x:v2", "--json").value["digest"]
    again = here("run", "team/x:v2", "a fox", "--seed", 6, "--steps", 1).line
    assert again == "a-fox-6-2.png"  # nothing was overwritten
    assert (here.home / "a-fox-6.png").read_bytes() == (here.home / again).read_bytes()
    here("run", "team/x:v2", "a fox", "--steps", 1, "-n", 2, "-o", "named.png")
    assert (here.home / "named-1.png").exists()
    assert (here.home / "named-2.png").exists()


def test_a_random_seed_is_printed(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    done = here("run", "x", "a fox", "--steps", 1, "-o", "one.png")
    (seed,) = [line.split()[1] for line in done.err.splitlines() if line.startswith("seed ")]
    here("run", "x", "a fox", "--steps", 1, "--seed", seed, "-o", "two.png")
    assert (here.home / "one.png").read_bytes() == (here.home / "two.png").read_bytes()


def test_replay_detects_a_changed_image(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    options = ("--width", 96, "--steps", 3, "--seed", 7, "--guidance", 2)
    cached = ("--cfg-truncation", 0.5, "--cache-threshold", 10)
    path = here.home / here("run", "x", "a fox", *options, *cached).line
    assert here("replay", path).line == "equal"
    other = here.home / here("run", "x", "a fox", *options).line
    with Image.open(path) as picture, Image.open(other) as whole:
        facts = json.loads(picture.info["aimage"])
        assert picture.tobytes() != whole.tobytes()
    assert (facts["guidance_end"], facts["cache_threshold"]) == (0.5, 10)
    from PIL.PngImagePlugin import PngInfo

    with Image.open(path) as picture:
        info = PngInfo()
        info.add_itxt("aimage", picture.info["aimage"])
        pixel = picture.getpixel((3, 3))
        assert isinstance(pixel, tuple)
        red, green, blue = pixel
        picture.putpixel((3, 3), (red ^ 8, green, blue))
        picture.save(path, pnginfo=info)
    done = here("replay", path, "--json", code=5)
    assert done.value["equal"] is False
    assert done.value["largestDifference"] == 8
    assert done.value["differingShare"] == pytest.approx(1 / (96 * 64 * 3))
    assert "by up to 8/255" in here("replay", path, code=5).out


def test_progress_is_plain_text_without_a_terminal(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    done = here("run", "x", "a fox", "--steps", 1, "--seed", 1)
    assert "\r" not in done.err
    assert "\x1b" not in done.err

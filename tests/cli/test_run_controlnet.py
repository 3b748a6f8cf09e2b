"""``create``, ``run`` and ``replay`` with control networks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests.conftest import TINY
from tests.controlnet_file import V1, V20, V21, tensors, write_directory, write_file
from tests.picture_file import load_picture
from tests.process import Aimage
from tests.store import copy_store

pytest.importorskip("mlx")

SMALL = ("--steps", 2, "--seed", 1, "--local")


@pytest.fixture(scope="module")
def union(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Aimage:
    """Return the command line with the tiny model ``x`` and its ControlNet ``union``."""
    home = tmp_path_factory.mktemp("union")
    made = Aimage(home, copy_store(tiny_store, home / "store"))
    file = write_file(home / "union.safetensors", tensors())
    made("create", "union", file, "--base", "x", "-q")
    return made


@pytest.fixture
def here(aimage: Callable[[], Aimage], union: Aimage) -> Aimage:
    """Return the command line with a copy of that store, the ControlNet as a file, and pictures."""
    found = aimage()
    copy_store(union.store, found.store)
    shutil.copy(union.home / "union.safetensors", found.home)
    for name, size in {"edges": (48, 32), "other": (32, 32)}.items():
        values = np.random.default_rng(len(name)).integers(0, 256, (*size[::-1], 3), np.uint8)
        Image.fromarray(values).save(found.home / f"{name}.png")
    mask = np.zeros((32, 48), np.uint8)
    mask[8:24, 8:32] = 255
    Image.fromarray(mask).save(found.home / "mask.png")
    return found


def drawn(here: Aimage, *words: object, name: str = "made.png") -> np.ndarray:
    here("run", "x", "a fox", *SMALL, "-o", name, *words)
    return np.asarray(Image.open(here.home / name)).astype(int)


def test_a_control_picture_guides_by_its_strength_and_is_replayed(here: Aimage) -> None:
    plain = drawn(here, "--size", "48x32")
    guided = drawn(here, "--control", "edges.png", "--controlnet", "union")
    assert guided.shape == plain.shape == (32, 48, 3)
    assert np.abs(guided - plain).max() > 2
    _, facts = load_picture(here.home / "made.png")
    assert facts["control"].startswith("sha256:") and facts["control_strength"] == 0.75
    assert facts["controlnet"].startswith("union@sha256:") and facts["fit"] == "stretch"
    assert "strength" not in facts
    assert here("replay", "made.png").out == "equal\n"
    digest = facts["control"].partition(":")[2]
    (here.store / "blobs" / "sha256" / digest).unlink()
    said = here("replay", "made.png", code=3).err
    assert f"the store lacks: the control picture sha256:{digest}" in said
    assert "name it with --control SOURCE" in said
    assert here("replay", "made.png", "--control", "edges.png").out == "equal\n"
    here("replay", "made.png", "--control", "other.png", code=5)
    options = ("--control", "edges.png", "--controlnet", "union", "--control-strength")
    assert np.array_equal(drawn(here, *options, "0"), plain)
    assert np.abs(drawn(here, *options, "0.4") - guided).max() > 1
    other = drawn(here, "--size", "48x32", "--control", "other.png", "--controlnet", "union")
    assert np.abs(other - guided).max() > 1


def test_a_control_picture_guides_from_a_picture_and_in_a_mask(here: Aimage) -> None:
    control = ("--control", "edges.png", "--controlnet", "union")
    image = ("--image", "edges.png", "--mask", "mask.png")
    alone, painted = drawn(here, *control), drawn(here, *control, *image)
    assert np.abs(painted - alone).max() > 1
    assert np.abs(drawn(here, *image) - painted).max() > 1
    assert here("replay", "made.png").out == "equal\n"
    begun = drawn(here, *control, "--image", "edges.png", "--strength", "0.5")
    assert np.abs(begun - alone).max() > 1
    pasted = drawn(here, *control, *image, "--paste", "--crop")
    original = np.asarray(Image.open(here.home / "edges.png")).astype(int)
    assert np.array_equal(pasted[:8], original[:8])
    refused = here(
        "run",
        "x",
        "a fox",
        *SMALL,
        "--size",
        "32x32",
        *image,
        "--crop",
        "--control",
        "other.png",
        "--controlnet",
        "union",
        code=2,
    ).err
    assert "--control: other.png has 32 x 32 pixels, the image has 48 x 32" in refused


@pytest.mark.integration
def test_a_control_picture_guides_a_larger_picture(here: Aimage) -> None:
    image, control = ("--image", "edges.png"), ("--control", "edges.png", "--controlnet", "union")
    for larger in ("--expand", "0,0,16,0"), ("--upscale", "2", "--steps", 4, "--size", "64x64"):
        guided = drawn(here, *image, *control, *larger, "--cache-threshold", "0.01")
        assert here("replay", "made.png").out == "equal\n"
        plain = drawn(here, *image, *larger)
        assert guided.shape == plain.shape and np.abs(guided - plain).max() > 1


@pytest.mark.parametrize("form", [V1, V20, V21])
def test_files_and_directories_of_each_version_guide_alike(here: Aimage, form: str) -> None:
    write_file(here.home / "file.safetensors", tensors(form))
    here("create", "file", "file.safetensors", "-q")
    here("create", "folder", write_directory(here.home / "folder", form), "--base", "x", "-q")
    control = ("--control", "edges.png", "--controlnet")
    found = drawn(here, *control, "file")
    assert np.array_equal(found, drawn(here, *control, "folder"))
    assert np.abs(found - drawn(here, "--size", "48x32")).max() > 1
    described = json.loads(here("show", "folder", "--json").out)["config"]
    assert (described["format"], described["architecture"]) == (
        "controlnet",
        "ZImageControlNetModel",
    )
    if form == V20:
        zeros = tensors(V21) | {
            name: np.zeros((48, 48), np.float32)
            for name in tensors(V21)
            if name.endswith("refiner.0.before_proj.weight")
        }
        zeros |= {name: one for name, one in tensors(V20).items() if "refiner" not in name}
        write_file(here.home / "zeros.safetensors", zeros)
        here("create", "zeros", "zeros.safetensors", "-q")
        assert np.array_equal(found, drawn(here, *control, "zeros"))


def test_a_model_may_have_its_own(here: Aimage) -> None:
    folder = here.home / "model"
    shutil.copytree(TINY, folder)
    write_directory(folder / "controlnet")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {
        "_class_name": "ZImageControlNetPipeline",
        "controlnet": ["diffusers", "ZImageControlNetModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    here("create", "own", folder, "-q")
    options = (*SMALL, "--control", "edges.png", "-o", "own.png")
    here("run", "own", "a fox", *options)
    expected = drawn(here, "--control", "edges.png", "--controlnet", "union")
    assert np.array_equal(np.asarray(Image.open(here.home / "own.png")).astype(int), expected)
    _, facts = load_picture(here.home / "own.png")
    assert facts["controlnet"] is None
    assert here("replay", "own.png").out == "equal\n"
    here("export", "own", "again", "-q")
    weights = "controlnet/diffusion_pytorch_model.safetensors"
    one, other = (load_file(root / weights) for root in (here.home / "again", folder))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    index["_class_name"] = "ZImagePipeline"
    del index["controlnet"]
    (folder / "model_index.json").write_text(json.dumps(index))
    here("create", "beside", folder, "-q")
    here("run", "beside", "a fox", *options)
    assert np.array_equal(np.asarray(Image.open(here.home / "own.png")).astype(int), expected)


def test_an_export_is_the_file_that_was_packed(here: Aimage) -> None:
    here("export", "union", "again", "-q")
    (file,) = Path(here.home / "again").glob("*.safetensors")
    assert file.read_bytes() == (here.home / "union.safetensors").read_bytes()


def test_a_control_network_of_another_base_is_refused(here: Aimage) -> None:
    for name, values, why in (
        ("wide", tensors(dim=96), ".0.adaLN_modulation.0.bias has the shape [384], not [192]"),
        ("deep", tensors(layers=3), "it has 3 control layers for 2 layers"),
        (
            "narrow",
            tensors() | {"control_all_x_embedder.2-1.weight": np.zeros((48, 60), np.float32)},
            "control_all_x_embedder.2-1.weight has the shape [48, 60], not at least [48, 64]",
        ),
    ):
        file = write_file(here.home / f"{name}.safetensors", values)
        refused = here("create", name, file, "--base", "x", code=5).err
        assert "the ControlNet does not fit x:latest: " in refused and why in refused
        here("create", name, file, "-q")
        options = ("--control", "edges.png", "--controlnet", name)
        refused = here("run", "x", "a fox", *SMALL, *options, code=5).err
        assert (
            f"the ControlNet {name}:latest does not fit the model: " in refused and why in refused
        )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--control", "edges.png"), 2, "this model has no ControlNet of its own"),
        (("--control", "edges.png", "--controlnet", "none"), 3, "none:latest"),
        (("--control", "edges.png", "--controlnet", "x"), 2, "x:latest is not a ControlNet"),
        (("--control", "nothing.png", "--controlnet", "union"), 3, "nothing.png"),
        (("--control", "union.safetensors", "--controlnet", "union"), 2, "not a picture"),
        (("--controlnet", "union"), 2, "controlnet requires a control picture"),
        (("--control-strength", "1"), 2, "control_strength requires a control picture"),
        (("--control", "edges.png", "--controlnet", "union", "--control-strength", "11"), 2, "11"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(
    here: Aimage, words: tuple[str, ...], code: int, message: str
) -> None:
    assert message in here("run", "x", "a fox", *SMALL, *words, code=code).err


def test_a_control_network_is_not_run_by_itself(here: Aimage) -> None:
    refused = here("run", "union", "a fox", *SMALL, code=1).err
    assert "union:latest is a ControlNet, not a model" in refused
    assert "aimage run MODEL PROMPT --controlnet union:latest --control FILE" in refused

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clowder_aimage.create import create
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.text.last_layer import has_intact_last_layer
from clowder_aimage.oci import Reference
from tests.text.tiny_text import write_model


def is_whole(directory: Path, recipe: Recipe | None = None) -> bool:
    layout = ImageLayout(directory.parent / "store")
    packed = create(layout, Reference.parse("m"), directory, recipe=recipe)
    return has_intact_last_layer(layout, packed.aimage)


def damage(directory: Path, name: str, share: float) -> Path:
    path = directory / "model.safetensors"
    weights = load_file(path)
    flat = weights[name].reshape(-1)
    flat[: int(share * flat.size)] = 0
    save_file(weights, path)
    return directory


@pytest.mark.parametrize(
    "layer, part, share, expected",
    [
        (1, "up_proj", 0.0, True),
        (1, "up_proj", 0.005, True),
        (1, "up_proj", 0.59, False),
        (1, "down_proj", 0.16, False),
        (0, "up_proj", 0.59, True),  # other layers are used by pictures too
    ],
)
def test_zeros_in_place_of_weights_of_the_last_layer(
    tmp_path: Path, layer: int, part: str, share: float, expected: bool
) -> None:
    directory = write_model(tmp_path / "m")
    damage(directory, f"model.layers.{layer}.mlp.{part}.weight", share)
    assert is_whole(directory) is expected


@pytest.mark.parametrize("kind", ["int8", "nvfp4"])
def test_quantized_weights_are_counted_after_dequantization(tmp_path: Path, kind: str) -> None:
    recipe = Recipe.parse(quantize=kind)
    directory = write_model(tmp_path / "m")
    assert is_whole(directory, recipe)
    assert not is_whole(damage(directory, "model.layers.1.mlp.up_proj.weight", 0.59), recipe)


def test_a_layer_that_is_missing_is_not_whole(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    path = directory / "model.safetensors"
    weights = load_file(path)
    kept = {name: value for name, value in weights.items() if ".layers.1." not in name}
    save_file({**kept, "extra": np.zeros(1, np.float32)}, path)
    assert not is_whole(directory)

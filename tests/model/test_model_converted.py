"""Every readable layout of blobs can be converted, with components and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.content import build_bytes_body, build_file_body
from clowder_aimage.create import convert
from clowder_aimage.dialect import DIALECTS, AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.importer import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Reference
from clowder_aimage.tensor import Quantization
from tests.model.model_blobs import FolderStore
from tests.model.quantized_blobs import COMPONENT, MATRICES, VECTORS, judge, made

OLD, NEW = Reference.parse("old"), Reference.parse("new")
CONFIG = {"schemaVersion": 1, "components": {}}
Keep = Callable[[FolderStore, AImage], ImageLayout]


@pytest.fixture
def blobs(tmp_path: Path) -> FolderStore:
    root = tmp_path / "blobs"
    root.mkdir()
    return FolderStore(root)


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Return ``keep(...)``: it writes an AImage with the name OLD into a layout."""

    def make(blobs: FolderStore, aimage: AImage) -> ImageLayout:
        store = ImageLayout(tmp_path / "store")
        for layer in aimage.layers:
            store.push(layer.descriptor, build_file_body(blobs.find_path(layer.descriptor)))
        whole = AImage(json.dumps(CONFIG).encode(), aimage.layers)
        manifest, config = DIALECTS["clowder"].write(whole)
        store.push(manifest.config, build_bytes_body(config))
        store.push(manifest.descriptor, build_bytes_body(manifest.raw), OLD)
        return store

    return make


def open_weights(store: ImageLayout, component: str) -> tuple[AImage, ModelWeights]:
    aimage = read_aimage(store, NEW).aimage
    return aimage, ModelWeights.open(store, aimage, component)


# test_model_quantized.py reads every layout
CASES = [
    ("int4", "combined", ""),
    ("nvfp4", "combined", COMPONENT),
    ("int8", "mlx keys, configured", COMPONENT),
    ("mxfp8", "group of mixed kinds", COMPONENT),
    ("int4", "layers of the first generation", COMPONENT),
    ("mxfp4", "layers of mlx", ""),
]


@pytest.mark.parametrize(("kind", "layout", "component"), CASES)
def test_convert_keeps_the_values_of_every_layout_and_kind(
    blobs: FolderStore, keep: Keep, kind: str, layout: str, component: str
) -> None:
    """Floats are cast; codes and scales keep their values."""
    size = 32 if kind == "int4" else None
    store = keep(blobs, made(blobs, kind, layout, size, component).aimage())
    packed = convert(store, OLD, NEW, Recipe.parse(dtype="f16"))
    aimage, weights = open_weights(store, component)
    for name, array in MATRICES.items():
        assert weights.get_quantization(name) == Quantization.parse(kind, size)
        np.testing.assert_array_equal(weights.read_numpy(name), judge(array, kind, size))
    for name, array in VECTORS.items():
        assert weights.read_numpy(name).dtype == np.float16
        np.testing.assert_array_equal(weights.read_numpy(name), array.astype(np.float16))
    weights.load()
    config = aimage.properties
    facts = {"type": kind, "group_size": Quantization.parse(kind, size).group_size}
    assert packed.report.quantized[component].items() >= facts.items()
    if component:
        assert config["components"][component]["quantization"].items() >= facts.items()
    else:
        assert (config["quantization"], config["components"]) == (kind, {})


def test_convert_refuses_to_quantize_twice(blobs: FolderStore, keep: Keep) -> None:
    store = keep(blobs, made(blobs, "int8", "combined", None, "transformer").aimage())
    with pytest.raises(UsageError, match="already quantized"):
        convert(store, OLD, NEW, Recipe.parse(quantize="int4"))

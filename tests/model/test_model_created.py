"""A model quantized by ``create`` generates the same picture in every dialect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.create import create
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.generate import load
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.backend import mx
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image
from clowder_aimage.model.runnable import open_runnable
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.tensor import Quantization
from tests.conftest import TINY
from tests.model.denoise import denoise
from tests.model.quantized_blobs import judge
from tests.model.random_model import weights, write_directory

REQUEST = GenerateRequest.of("a red fox", width=48, height=48, steps=4, seed=42)
NAME = Reference.parse("random")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    write_directory(root)
    return root


def latents(
    directory: Path, store: ImageLayout, quantize: str | None, dialect: str = "clowder"
) -> np.ndarray:
    create(store, NAME, directory, dialect=dialect, recipe=Recipe.parse(quantize=quantize))
    pipeline = load_pipeline(store, read_aimage(store, NAME).aimage, dtype="float32")
    noise, guide = pipeline.denoiser.draw_noise(REQUEST, 42), pipeline.build_conditioning(REQUEST)
    *_, final = denoise(pipeline, noise, pipeline.schedule(REQUEST), guide)
    return np.array(final)


@pytest.mark.parametrize(
    ("quantize", "bound"),
    [("transformer=nvfp4,text_encoder=int4", 0.98), ("mxfp8", 0.99)],
)
def test_pictures_of_created_ones(
    directory: Path, tmp_path: Path, quantize: str, bound: float
) -> None:
    store = ImageLayout(tmp_path)
    exact, found = latents(directory, store, None), latents(directory, store, quantize)
    assert bound < np.corrcoef(exact.ravel(), found.ravel())[0, 1] < 1 - 1e-7
    for dialect in ("ollama",) if "nvfp4" in quantize else ("container",):
        np.testing.assert_array_equal(latents(directory, store, quantize, dialect), found)


def test_the_model_has_the_names_of_checkpoints(directory: Path) -> None:
    for component, name in (
        ("transformer", "cap_embedder.1.weight"),
        ("transformer", "layers.0.attention.to_out.0.weight"),
        ("transformer", "t_embedder.mlp.0.weight"),
        ("vae", "decoder.mid_block.attentions.0.to_out.0.weight"),
    ):
        assert name in weights(component)
        (path,) = (directory / component).glob("*.safetensors")
        assert f'"{name}"'.encode() in path.read_bytes()


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_values_of_created_ones(directory: Path, tmp_path: Path, kind: str) -> None:
    """Bit for bit what MLX makes of the same numbers."""
    store, name = ImageLayout(tmp_path), "layers.0.attention.to_q.weight"
    create(store, NAME, directory, recipe=Recipe.parse(quantize=kind))
    found = ModelWeights.open(store, read_aimage(store, NAME).aimage, "transformer")
    assert found.get_quantization(name) == Quantization.parse(kind)
    expected = judge(weights("transformer")[name], kind, dtype=mx.float32)
    np.testing.assert_array_equal(found.read_numpy(name), expected)
    assert found.get_quantization("layers.0.attention_norm1.weight") is None


def test_whole_files_of_tensors_are_read_as_well(tmp_path: Path) -> None:
    """As ModelPack and others pack a directory of diffusers: the same picture."""
    store = ImageLayout(tmp_path / "store")
    made = create(store, Reference.parse("tensors"), TINY).aimage
    layers = []
    for path in sorted(TINY.rglob("*")):
        if not path.is_file() or path.suffix == ".md":
            continue
        data = path.read_bytes()
        descriptor = Descriptor.of(mediatype.AIMAGE_FILE, data)
        store.push(descriptor, build_bytes_body(data))
        layers.append(Layer(descriptor, path.relative_to(TINY).as_posix()))
    manifest, config = DIALECTS["modelpack"].write(AImage(made.config, tuple(layers)))
    store.push(manifest.config, build_bytes_body(config))
    store.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse("files"))
    pictures = []
    for name in ("tensors", "files"):
        with store.lease() as lease:
            stored = open_runnable(store, Reference.parse(name), lease)
            model = load(store, stored)
            request = GenerateRequest.draft("a dog", steps=1, seed=3).apply_defaults(stored.aimage)
            (picture,) = [one for one in model.generate(request) if isinstance(one, Image)]
            pictures.append(picture.pixels.tobytes())
    assert pictures[0] == pictures[1]

"""Pictures from quantized AImages: how near they are to those of the whole weights.

Random weights and eight steps; the bounds are what was measured, with a margin. docs/weights.md
has the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.errors import ModelError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image
from clowder_aimage.model.quantized import QuantizedLinear
from tests.model.denoise import denoise
from tests.model.model_blobs import FolderStore
from tests.model.random_model import pack, takes_codes, weights

REQUEST = GenerateRequest.of("a red fox", width=64, height=64, steps=8, seed=42)
# correlations of latents with float32's, at least
BOUNDS = {"int8": 0.999, "mxfp8": 0.998, "int4": 0.98, "nvfp4": 0.98, "mxfp4": 0.97}
ALONE, BOTH = ("transformer",), ("transformer", "text_encoder")
Load = Callable[..., FlowPipeline]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return ``load(kind, components)``: a pipeline in float32."""
    store = FolderStore(tmp_path_factory.mktemp("blobs"))

    def load(kind: str = "", components: tuple[str, ...] = (), keep: bool = False) -> FlowPipeline:
        aimage = pack(store, dict.fromkeys(components, kind))
        return load_pipeline(store, aimage, dtype="float32", keep_quantized=keep)

    return load


def latents(pipeline: FlowPipeline, request: GenerateRequest = REQUEST) -> np.ndarray:
    noise = pipeline.denoiser.draw_noise(request, request.sampling.seed)
    guide = pipeline.build_conditioning(request)
    *_, final = denoise(pipeline, noise, pipeline.schedule(request), guide)
    return np.array(final)


@pytest.fixture(scope="module")
def exact(load: Load) -> np.ndarray:
    return latents(load())


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


@pytest.mark.parametrize(
    ("kind", "components"), [*((kind, BOTH) for kind in BOUNDS), ("int4", ALONE)]
)
def test_latents_stay_near(
    load: Load, exact: np.ndarray, kind: str, components: tuple[str, ...]
) -> None:
    found = latents(load(kind, components))
    assert BOUNDS[kind] <= correlation(found, exact) < 1 - 1e-7
    assert found.std() == pytest.approx(exact.std(), rel=0.1)


@pytest.mark.parametrize("kind", ["int4", "mxfp8", "nvfp4"])
def test_kept_codes_make_the_same_picture(load: Load, kind: str) -> None:
    """Simulate the dequantization of a GPU on the CPU, in float32."""
    kept, plain = load(kind, BOTH, keep=True), load(kind, BOTH)
    transformer, text_encoder = kept.networks.transformer.get(), kept.networks.text_encoder.get()
    assert isinstance(transformer.layers[0].attention.to_q, QuantizedLinear)
    assert isinstance(transformer.t_embedder.linear1, QuantizedLinear)
    assert isinstance(text_encoder.layers[0].mlp.up_proj, QuantizedLinear)
    short = REQUEST.change(steps=2)
    one, other = latents(kept, short), latents(plain, short)
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_kept_codes_in_bfloat16(load: Load, tmp_path: Path) -> None:
    """The type that a GPU computes in: a picture, and one that is not far off."""
    store = FolderStore(tmp_path)
    aimage = pack(store, dict.fromkeys(BOTH, "int8"))
    pipeline = load_pipeline(store, aimage, dtype="bfloat16", keep_quantized=True)
    assert pipeline.prompts.encode("a fox").dtype == mx.bfloat16
    short = REQUEST.change(width=32, height=32, steps=2)
    *_, image = pipeline.generate(short)
    assert isinstance(image, Image)
    *_, expected = load("int8", BOTH).generate(short)
    assert isinstance(expected, Image)
    assert correlation(image.pixels.astype(float), expected.pixels.astype(float)) > 0.9


def test_most_weights_are_quantized() -> None:
    found = weights("transformer")
    codes = sum(values.size for name, values in found.items() if takes_codes(name, values))
    assert codes > 0.6 * sum(values.size for values in found.values())


MLX = {
    "quantization": {"group_size": 64, "bits": 8},
    "quantization_config": {"group_size": 64, "bits": 8},
}
CONFIGS = {
    "MLX's": MLX,
    "ModelOpt's": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    "compressed-tensors'": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
        }
    },
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_configurations_of_other_makers(tmp_path: Path, config: dict[str, object]) -> None:
    """They travel with the model; what its blobs say counts."""
    store = FolderStore(tmp_path)
    configs = dict.fromkeys(("transformer", "text_encoder", "vae"), config)
    aimage = pack(store, {"transformer": "nvfp4"}, configs)
    pipeline = load_pipeline(store, aimage, dtype="float32", keep_quantized=True)
    layer = pipeline.networks.transformer.get().layers[0]
    assert layer.attention.to_q.quantization.type.name == "nvfp4"


def test_a_quantization_that_cannot_be_read(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    configs = {"transformer": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}
    with pytest.raises(ModelError, match=r"quantization_config .* unsupported quantization"):
        load_pipeline(store, pack(store, {}, configs), dtype="float32")

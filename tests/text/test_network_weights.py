from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.errors import ModelError
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm import cuda_network
from clowder_aimage.model.mlxlm.library import make_network
from clowder_aimage.model.mlxlm.network_weights import (
    choose_form,
    count_parameter_bytes,
    load_network,
)
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Reference
from tests.text.tiny_text import write_model


def weights(root: Path, kind: str, quantization: str | None) -> ModelWeights:
    directory = write_model(root / "m", kind)
    recipe = Recipe.parse(quantize=quantization)
    layout = ImageLayout(root / "store")
    return ModelWeights.open(
        layout, create(layout, Reference.parse("m"), directory, recipe=recipe).aimage
    )


def logits(source: ModelWeights, *, keep_quantized: bool) -> tuple[mx.array, Any]:
    network = make_network(source.config).network
    load_network(source, network, mx.float32, keep_quantized=keep_quantized)
    return network(mx.array([[5, 6, 7, 8]])), network


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "mxfp8", "nvfp4"])
def test_codes_and_dequantized_values_give_the_same_logits(
    tmp_path: Path, kind: str, quantization: str
) -> None:
    source = weights(tmp_path, kind, quantization)
    expected, whole = logits(source, keep_quantized=False)
    found, small = logits(source, keep_quantized=True)
    assert count_parameter_bytes(small) < count_parameter_bytes(whole)
    error = mx.abs(found - expected).max() / mx.abs(expected).max()
    assert error.item() < 2e-3  # type: ignore[operator]


@pytest.mark.parametrize("quantization", ["int8", "nvfp4"])
def test_cuda_multiplies_many_rows_with_dequantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    source = weights(tmp_path, "qwen3", quantization)
    expected, _ = logits(source, keep_quantized=True)
    monkeypatch.setattr(cuda_network, "is_on_cuda", lambda: True)
    monkeypatch.setattr(cuda_network, "MAX_CUDA_ROWS", 3)
    products = []
    real = mx.quantized_matmul

    def multiply(x: mx.array, *arguments: Any, **keywords: Any) -> mx.array:
        products.append(x.size // x.shape[-1])
        return real(x, *arguments, **keywords)

    monkeypatch.setattr(mx, "quantized_matmul", multiply)
    found, network = logits(source, keep_quantized=True)
    assert products == []
    error = mx.abs(found - expected).max() / mx.abs(expected).max()
    assert error.item() < 2e-3  # type: ignore[operator]
    network(mx.array([[5, 6, 7]]))
    assert products and set(products) == {3}


def test_a_cpu_takes_a_smaller_form_only_if_the_memory_requires_it(tmp_path: Path) -> None:
    plain = weights(tmp_path / "plain", "qwen3", None)
    size = sum(mx.zeros(shape, mx.float32).nbytes for shape in plain.get_shapes().values())
    assert choose_form(plain, None, size) == (mx.float32, False)
    assert choose_form(plain, None, size - 1) == (mx.bfloat16, False)
    with pytest.raises(ModelError, match="the weights take"):
        choose_form(plain, "float32", size - 1)
    quantized = weights(tmp_path / "quantized", "qwen3", "int8")
    assert choose_form(quantized, None, size // 3) == (mx.bfloat16, True)

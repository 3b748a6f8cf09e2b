from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from mlx.nn.layers.positional_encoding import RoPE

from clowder_aimage.model.backend import Linear, Network, RMSNorm, mx
from clowder_aimage.model.mlxlm.cpu_network import accelerate, attend, project
from clowder_aimage.model.mlxlm.library import import_library_module
from clowder_aimage.model.mlxlm.rotary import ScaledRope


def random(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def masks(length: int, columns: int) -> dict[str, Any]:
    place = mx.arange(columns - length, columns)[:, None]
    window = (mx.arange(columns)[None] <= place) & (mx.arange(columns)[None] > place - 40)
    return {"none": None, "causal": "causal", "window": window, "added": mx.where(window, 0, -1e9)}


@pytest.mark.parametrize("length, columns", [(1, 700), (300, 700), (64, 64)])
@pytest.mark.parametrize("mask", ["none", "causal", "window", "added"])
def test_attention_is_that_of_mlx(length: int, columns: int, mask: str) -> None:
    buffer = random(1, 2, columns + 56, 32)
    keys, values = buffer[..., :columns, :], random(1, 2, columns, 32)  # a part of a cache
    queries = random(1, length, 6, 32).transpose(0, 2, 1, 3)
    seen = masks(length, columns)[mask]
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=seen)
    found = attend(queries, keys, values, 0.2, seen)
    assert found.shape == expected.shape
    assert mx.abs(found - expected).max().item() < 1e-5  # type: ignore[operator]


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])  # as by GPT-2
def test_products_are_those_of_mlx(rows: int, has_bias: bool, is_transposed: bool) -> None:
    x, bias = random(1, rows, 600), random(700)
    weight = random(600, 700).T if is_transposed else random(700, 600)
    found = project(x, weight, bias if has_bias else None)
    expected = x @ weight.T + (bias if has_bias else 0)
    assert mx.abs(found - expected).max().item() < 1e-3  # type: ignore[operator]


def same(layer: Any, x: mx.array, **options: Any) -> None:
    """Check that a layer computes the same after it is accelerated, as another class."""

    class One(Network):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

    usual, kind, names = layer(x, **options), type(layer), {*layer.parameters()}
    accelerate(One())
    assert type(layer) is not kind and {*layer.parameters()} == names
    assert mx.abs(layer(x, **options) - usual).max().item() < 1e-5  # type: ignore[operator]


def test_norms_and_small_products_are_those_of_mlx() -> None:
    norm = RMSNorm(32, 1e-3)
    norm.weight = random(32)
    same(norm, random(1, 3, 2, 32))
    same(Linear(32, 16), random(1, 1, 32))


@pytest.mark.parametrize("offset, length", [(0, 5), (300, 1)])
def test_rotary_positions_are_those_of_mlx(offset: int, length: int) -> None:
    config = {"factor": 8.0, "original_max_position_embeddings": 64}
    llama = import_library_module("models.rope_utils").Llama3RoPE(16, scaling_config=config)
    frequencies = np.geomspace(1, 1e-3, 8, dtype=np.float32)
    scaled = ScaledRope(frequencies, 1.25, traditional=False)
    for layer in (RoPE(16), RoPE(16, base=1e6, scale=0.5), llama, scaled):
        same(copy.copy(layer), random(1, 2, length, 24), offset=offset)  # 8 channels stay
        same(layer, random(2, 2, length, 24), offset=mx.array([offset, 7]))


def test_layers_with_the_same_frequencies_share_angles() -> None:
    class Two(Network):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [RoPE(16), RoPE(16)]

    network, x = Two(), random(1, 1, 2, 16)
    accelerate(network)
    first, second = (layer(x, offset=7) for layer in network.layers)
    assert mx.array_equal(first, second)
    assert mx.array_equal(network.layers[0](x, offset=0)[..., 0, :], x[..., 0, :])
    assert not mx.array_equal(network.layers[1](x, offset=9), second)

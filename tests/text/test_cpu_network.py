from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm.cpu_network import attend, project


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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_mlx(rows: int, has_bias: bool) -> None:
    x, weight, bias = random(1, rows, 600), random(700, 600), random(700)
    found = project(x, weight, bias if has_bias else None)
    expected = x @ weight.T + (bias if has_bias else 0)
    assert mx.abs(found - expected).max().item() < 1e-3  # type: ignore[operator]

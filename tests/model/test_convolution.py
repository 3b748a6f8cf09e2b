"""Convolutions by shifted products, compared with MLX's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clowder_aimage.model.backend import Conv2d, GroupNorm, mx
from clowder_aimage.model.compute import convolution as module
from clowder_aimage.model.compute.convolution import convolve
from clowder_aimage.tensor import blas


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (5, 1), (2, 9), (23, 17)], ids=str)
def test_equals_the_steps_of_mlx(
    size: tuple[int, int], is_normed: bool, scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_VALUES", 512)  # several parts
    monkeypatch.setattr(module, "_PIXELS", 64)
    x, conv = normal(1, *size, 8), Conv2d(8, 6, 3, padding=1)
    norm = GroupNorm(4, 8, eps=1e-6, pytorch_compatible=True)
    norm.weight, norm.bias = normal(8), normal(8)
    residual = normal(1, scale * size[0], scale * size[1], 6)
    options: dict[str, Any] = {"norm": norm if is_normed else None, "scale": scale}
    found = np.array(convolve(x, conv, **options))
    added = np.array(convolve(x, conv, residual=mx.array(residual), **options))
    monkeypatch.setattr(blas, "is_fast", lambda: False)
    expected = np.array(convolve(x, conv, **options))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(added, expected + np.array(residual), atol=2e-5)


def test_one_by_one() -> None:
    x, conv = normal(1, 4, 5, 8), Conv2d(8, 6, 1)
    np.testing.assert_allclose(np.array(convolve(x, conv)), np.array(conv(x)), atol=1e-5)


def test_bfloat16_stays() -> None:
    x, conv = normal(1, 4, 5, 8).astype(mx.bfloat16), Conv2d(8, 6, 3, padding=1)
    conv.set_dtype(mx.bfloat16)
    assert convolve(x, conv).dtype == mx.bfloat16

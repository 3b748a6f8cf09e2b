"""Codes of int4 and int8 are bit for bit those of MLX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clowder_aimage.importer.affine_quantizer import quantize_affine
from clowder_aimage.importer.quantizer import _quantize_by_mlx
from clowder_aimage.tensor import Quantization

_WORD: dict[str, Any] = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
_FLOAT = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
# Of the largest values: twice as large ones have no range in float32
_LESS = {"F32": 2 << 23, "F16": 0, "BF16": 2 << 7}


def draw_words(dtype: str, count: int, seed: int) -> Any:
    """Return random bits of finite values, of all magnitudes."""
    rng = np.random.default_rng(seed)
    word, exponent = _WORD[dtype], _EXPONENT[dtype]
    words = rng.integers(0, np.iinfo(word).max, count, dtype=word, endpoint=True)
    is_too_large = words & exponent >= exponent - _LESS[dtype]
    words[is_too_large] &= np.iinfo(word).max ^ exponent
    return words


def draw_groups(dtype: str, size: int) -> Any:
    """Return groups of unusual values, and of the sizes of weights, as bits."""
    rng = np.random.default_rng(size)
    usual = rng.standard_normal((64, size), np.float32) * 0.02
    steps = np.arange(size, dtype=np.float32)
    groups = [
        0 * steps,
        -0 * steps,
        0 * steps + 1,
        0 * steps - 3,
        steps,
        -steps,
        steps - size // 2,
        steps % 16,
        steps % 2 - 1,
        1e-8 * steps,
        1e-30 * steps,
        np.abs(usual[0]),
        -np.abs(usual[1]),
        np.where(steps, usual[2], 100),
    ]
    # Halves of a step are ties
    groups += [number / 2 + steps % 16 for number in (1, 3, -7)]
    values = np.concatenate([np.stack(groups), usual]).astype(np.float32)
    bits = values.view(np.uint32)
    if dtype == "BF16":
        return (bits >> 16).astype(np.uint16)
    return bits if dtype == "F32" else values.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_codes_scales_and_biases_are_those_of_mlx(kind: str, dtype: str, size: int) -> None:
    quantization = Quantization.parse(kind, size)
    usual = draw_groups(dtype, size).reshape(-1)
    for words in (usual, draw_words(dtype, 2000 * size, size), usual[:size]):
        before = words.copy()
        rows = words.view(_FLOAT[dtype]).reshape(1, -1)
        found = quantize_affine(rows, dtype, quantization)
        assert found == _quantize_by_mlx(rows, dtype, quantization)
        assert np.array_equal(words, before)

"""nvfp4 and mxfp4: the same bits as ``mx.quantize``, for all kinds of values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from clowder_aimage.importer import e2m1_quantizer
from clowder_aimage.importer.e2m1_quantizer import quantize_e2m1
from clowder_aimage.importer.quantizer import Quantizer
from clowder_aimage.model.backend import mx
from clowder_aimage.tensor import Quantization

DTYPES: dict[str, tuple[Any, Any, int, int]] = {
    "F32": (mx.float32, np.uint32, 23, 255),
    "F16": (mx.float16, np.uint16, 10, 31),
    "BF16": (mx.bfloat16, np.uint16, 7, 255),
}
GROUPS = 256
# Halfway between codes, and codes
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.5, 4, 6)
Words = Any


def quantize_by_mlx(words: Words, dtype: str, quantization: Quantization) -> tuple[bytes, ...]:
    values = mx.array(words).view(DTYPES[dtype][0], stream=mx.cpu)
    kind = quantization.type
    arrays = mx.quantize(
        values, group_size=quantization.group_size, bits=4, mode=kind.mode, stream=mx.cpu
    )
    return tuple(np.array(array).tobytes() for array in arrays)


def draw_words(rng: np.random.Generator, dtype: str) -> Words:
    """Return all kinds of bits: NaN, infinity, subnormal numbers."""
    return rng.integers(0, 1 << 32, (GROUPS, 32), np.uint64).astype(DTYPES[dtype][1])


def draw_groups(rng: np.random.Generator, dtype: str) -> Words:
    """Return groups of similar magnitudes, over all exponents."""
    _, word, mantissa, exponents = DTYPES[dtype]
    largest = np.arange(GROUPS)[:, None] % (exponents + 1)
    chosen = np.maximum(0, largest - rng.integers(0, 6, (GROUPS, 32))).astype(word)
    return draw_words(rng, dtype) & ~word(exponents << mantissa) | chosen << word(mantissa)


def draw_zeros(rng: np.random.Generator, dtype: str) -> Words:
    """Return groups of both zeros, and of zeros and numbers."""
    _, word, mantissa, exponents = DTYPES[dtype]
    words = np.where(rng.random((GROUPS, 32)) < 0.8, word(0), draw_groups(rng, dtype))
    words[::3] = 0
    words[1::3, ::5] = word((exponents + 1) << mantissa)
    return words


def draw_ties(rng: np.random.Generator, dtype: str, step: int = 0) -> Words:
    """Return numbers between two codes, moved by ``step``, in groups of simple scales."""
    scales = np.ldexp(1 + rng.integers(0, 8, GROUPS) / 8, np.arange(GROUPS) % 16 - 8)
    values = rng.choice(np.array([*TIES, *(-value for value in TIES)]), (GROUPS, 32))
    values[:, ::16] = 6
    numbers = (values * scales[:, None]).astype(np.float32)
    if dtype == "F16":
        return numbers.astype(np.float16).view(np.uint16) + np.uint16(step & 0xFFFF)
    words = numbers.view(np.uint32) >> (0 if dtype == "F32" else 16)
    return words.astype(DTYPES[dtype][1]) + DTYPES[dtype][1](step % (1 << 16))


def draw_saturated(rng: np.random.Generator, dtype: str) -> Words:
    """Return groups with a number that exceeds 448 * 6 beside small ones."""
    words = draw_ties(rng, dtype)
    _, word, mantissa, exponents = DTYPES[dtype]
    words[:, 3] = word((exponents - 1) << mantissa)
    return words


KINDS: dict[str, Callable[..., Words]] = {
    "any bits": draw_words,
    "all exponents": draw_groups,
    "zeros": draw_zeros,
    "saturated": draw_saturated,
    "ties": draw_ties,
    "above ties": partial(draw_ties, step=1),
    "far above ties": partial(draw_ties, step=3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
def test_the_bits_are_those_of_mlx(mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2m1_quantizer, "_BLOCK", 3000)
    quantization = Quantization.parse(mode)
    view = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype]
    different = []
    with Quantizer() as quantizer:
        for kind, draw in KINDS.items():
            words = draw(np.random.default_rng(7), dtype)
            found = quantizer.quantize(words.view(view), dtype, quantization)
            if found != quantize_by_mlx(words, dtype, quantization):
                different.append(kind)
    assert different == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
def test_ordinary_groups_are_not_left_to_mlx(mode: str, dtype: str) -> None:
    def refuse(_: Words) -> tuple[bytes, ...]:
        raise AssertionError("MLX was called")

    rng = np.random.default_rng(7)
    values = rng.standard_normal((64, 64)).astype(np.float32) * 0.02
    values[3:5] = 0
    words = {
        "F32": values,
        "F16": values.astype(np.float16),
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
    }
    codes, scales = quantize_e2m1(words[dtype], dtype, Quantization.parse(mode), refuse)
    assert len(codes) == 64 * 64 // 2
    assert len(scales) == 64 * 64 // Quantization.parse(mode).group_size

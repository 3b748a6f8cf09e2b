"""Check of values that quantization would silently ruin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError
from clowder_aimage.tensor import Quantization

# Share of the groups with nonzero values that may become zeros.
MAX_ZEROED = 0.01
REACH: Mapping[str, float] = {
    # The range from the smallest to the largest value, twice this, must fit float32.
    "affine": 1.7e38,
    # The largest scale times the largest code.
    "nvfp4": 448.0 * 6.0,
    # Larger values round to infinity.
    "mxfp8": 448.0 * 2.0**119,
}
"""The largest value of each of MLX's modes."""
_MX = ("mxfp4", "mxfp8")
# The word type of a value, its bits without the sign, those of infinity and of 2**-118.
_BITS = {
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000, 9 << 23),
    "BF16": ("<u2", 0x7FFF, 0x7F80, 9 << 7),
    "F16": ("<u2", 0x7FFF, 0x7C00, 0),
}
_USE_MXFP8 = "use mxfp8, whose scales have a larger range"
_KEEP = "keep it unquantized, or repair the model"
Words = npt.NDArray[Any]


class QuantizationGuard:
    """Check of the tensor ``name``, block by block, during its quantization from ``dtype``."""

    def __init__(self, name: str, dtype: str, quantization: Quantization) -> None:
        self._name = name
        self._dtype = dtype
        self._quantization = quantization
        self._word, self._mask, self._infinity, self._tiny = _BITS[dtype]
        self._is_mx = quantization.type.mode in _MX
        # Scales of rows are not MLX's
        self._wraps = self._is_mx and not quantization.is_by_row and bool(self._tiny)
        self._largest = _encode_bits(REACH.get(quantization.type.mode, math.inf), dtype)
        self._lost, self._groups = 0, 0

    def admit(self, values: Words) -> Words:
        """Return the values, adjusted for quantization.

        Raises:
            ModelError: Some are not finite, or exceed the range of the type.
        """
        words = values.view(self._word)
        largest = _find_largest(words, self._mask)
        is_usual = largest < self._infinity and largest <= self._largest
        if is_usual and not self._wraps:
            return values
        sizes = words & self._mask
        if largest >= self._infinity:
            count = int(np.count_nonzero(sizes >= self._infinity))
            raise ModelError(f"{_format_count(count, self._name)} NaN or infinite", hint=_KEEP)
        if not is_usual:
            raise self._build_size_error(int(np.count_nonzero(sizes > self._largest)))
        is_tiny = sizes < self._tiny
        if not sizes[is_tiny].any():
            return values
        # The scale exponent of such a group is below that of E8M0, and MLX lets it wrap around:
        # values near 1e-37 would be dequantized to 1e35 and more.
        replaced: Words = np.where(is_tiny, 0, words).astype(self._word)
        return replaced.view(values.dtype)

    def count(self, values: Words, codes: bytes, scales: bytes, biases: bytes | None) -> None:
        """Count the groups of a block that became zeros."""
        # The scales of mx types have the range of float32.
        if self._is_mx:
            return
        is_zero = self._find_zeros(codes, scales, biases)
        groups = values.view(self._word).reshape(is_zero.size, -1)
        lost = int(np.count_nonzero((groups[is_zero] & self._mask).any(axis=1)))
        self._lost += lost
        self._groups += lost + is_zero.size - int(np.count_nonzero(is_zero))

    def _find_zeros(self, codes: bytes, scales: bytes, biases: bytes | None) -> Words:
        """Return a mask of the groups that are dequantized to zeros."""
        if biases is None:
            is_zero: Words = (np.frombuffer(scales, "u1") & 0x7F) == 0
            return is_zero
        is_zero = (np.frombuffer(biases, self._word) & self._mask) == 0
        if is_zero.any():
            words = self._quantization.group_size // self._quantization.per_word
            coded = np.frombuffer(codes, "<u4").reshape(-1, words)[is_zero].any(axis=1)
            is_zero[is_zero] = ~coded
        return is_zero

    def check(self) -> None:
        """Check that few groups became zeros. Raises ModelError."""
        kind = self._quantization.type.name
        if self._lost > MAX_ZEROED * self._groups:
            share = 100 * self._lost / self._groups
            raise ModelError(
                f"the values of {self._name[:200]} are too small for {kind}: {share:.3g} % of its "
                "groups would become zero",
                hint=_USE_MXFP8,
            )

    def _build_size_error(self, count: int) -> ModelError:
        kind = self._quantization.type
        return ModelError(
            f"{_format_count(count, self._name)} too large for {kind.name}, whose maximum is "
            f"{REACH[kind.mode]:.4g}",
            hint=_USE_MXFP8 if kind.mode == "nvfp4" else _KEEP,
        )


def _find_largest(words: Words, mask: int) -> int:
    """Return the bits of the largest magnitude, 0 without values; no array is made.

    Words with the sign are larger than those without it, and as signed integers they are less.
    """
    if not words.size:
        return 0
    signed = words.view(f"<i{words.itemsize}")
    return max(int(words.max()) & mask, int(signed.max()))


def _format_count(count: int, name: str) -> str:
    values, are = ("1 value", "is") if count == 1 else (f"{count} values", "are")
    return f"{values} of {name[:200]} {are}"


def _encode_bits(value: float, dtype: str) -> int:
    """Return the word of the largest value of ``dtype`` that does not exceed ``value``."""
    word, _, infinity, _ = _BITS[dtype]
    if dtype == "F16":
        return int(np.array(value, "<f2").view(word)) if value < 65504 else infinity
    with np.errstate(over="ignore"):
        bits = int(np.array(value, "<f4").view("<u4"))
    return bits >> 16 if dtype == "BF16" else bits

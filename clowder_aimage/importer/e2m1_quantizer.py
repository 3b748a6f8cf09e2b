"""Quantization to nvfp4 and mxfp4: bit for bit MLX's, which takes some 20 times as long on a CPU.

MLX compares each value with all sixteen numbers of E2M1 and takes the first of the nearest, so
ties round towards zero. Here a code is the number of thresholds that the magnitude exceeds. The
few groups without ordinary scales are MLX's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.float_code import E4M3, E8M0, Bytes, Floats

Words = npt.NDArray[Any]
Quantize = Callable[[Words], tuple[bytes, ...]]

E2M1_MODES = ("nvfp4", "mxfp4")
"""MLX's modes with codes of E2M1."""

# Values that fit the cache of a core with all their intermediate results
_BLOCK = 1 << 16
_LARGEST_CODE = np.float32(6)
# Midpoints of adjacent magnitudes of E2M1
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Bits of the mantissa; MLX rounds quotients to the type of the values
_MANTISSA = {"F32": 23, "F16": 10, "BF16": 7}
# The word type, its bits without the sign, and the words of 2**-118 and of infinity
_WORD: dict[str, tuple[Any, int, int, int]] = {
    "F32": (np.uint32, 0x7FFFFFFF, 9 << 23, 0x7F800000),
    "F16": (np.uint16, 0x7FFF, 0, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 9 << 7, 0x7F80),
}
# Larger quotients have saturated scales; MLX's differences are inexact there
_USUAL = np.float32(16)


def quantize_e2m1(
    rows: Words, dtype: str, quantization: Quantization, by_mlx: Quantize
) -> tuple[bytes, bytes]:
    """Return the codes and the scales of ``rows``, whole groups of the bits of ``dtype``."""
    word, mask, least, infinity = _WORD[dtype]
    size = quantization.group_size
    groups = rows.view(word).reshape(-1, size)
    codes = np.empty((len(groups), size // 2), np.uint8)
    scales = np.empty(len(groups), np.uint8)
    thresholds = _compute_thresholds(_MANTISSA[dtype])
    for start in range(0, len(groups), _BLOCK // size):
        part = slice(start, start + _BLOCK // size)
        # A row is one value of each group, so that operations are on long rows
        columns = np.ascontiguousarray(groups[part].T)
        largest = (columns & mask).max(axis=0)
        quotients = _to_float(columns, dtype)
        with np.errstate(all="ignore"):
            scales[part], divisors = _compute_scales(largest, dtype, size)
            divisors[largest == 0] = 1
            quotients /= divisors
            is_usual = _to_float(largest, dtype) <= divisors * _USUAL
        is_usual &= largest < infinity
        if quantization.type.mode == "mxfp4":
            is_usual &= (largest >= least) | (largest == 0)
        codes[part] = _encode(quotients, thresholds).T
        if not is_usual.all():
            unusual = start + np.flatnonzero(~is_usual)
            slow = by_mlx(groups[unusual].view(rows.dtype))
            codes[unusual] = np.frombuffer(slow[0], np.uint8).reshape(len(unusual), -1)
            scales[unusual] = np.frombuffer(slow[1], np.uint8)
    return codes.tobytes(), scales.tobytes()


def _compute_thresholds(mantissa: int) -> list[np.float32]:
    """Return the least float32 numbers that round to more than each midpoint, less one step."""
    if mantissa == 23:
        return [np.float32(value) for value in _MIDPOINTS]
    # Half a step above; the tie itself rounds to the midpoint, whose mantissa is even
    return [np.float32(v + 2.0 ** (np.frexp(v)[1] - 2 - mantissa)) for v in _MIDPOINTS]


def _to_float(words: Words, dtype: str) -> Floats:
    if dtype == "F32":
        return words.view(np.float32).copy()
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    wide = words.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _compute_scales(largest: Words, dtype: str, size: int) -> tuple[Bytes, Floats]:
    """Return the scales of groups by their largest magnitude, as codes and as float32."""
    values = _round(_to_float(largest, dtype) / _LARGEST_CODE, dtype)
    bits = values.view(np.uint32)
    if size == 16:
        # All bits that E4M3 drops count as one
        codes = _build_e4m3_codes()[(bits >> 16) | ((bits & 0xFFFF) != 0)]
        return codes, E4M3[codes]
    # The next power of two: that of the exponent, and one more with a mantissa
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    codes = np.where(bits == 0, 127, exponents).astype(np.uint8)
    return codes, E8M0[codes]


@cache
def _build_e4m3_codes() -> Bytes:
    """Return the code of the nearest number for each upper half of a positive float32."""
    values = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)
    numbers = E4M3[:127]
    midpoints = (numbers[:-1] + numbers[1:]) / 2
    # Larger ones, infinity and NaN as well, have the last code, as in MLX
    codes = np.searchsorted(midpoints, values).astype(np.uint8)
    is_tie = np.isin(values, midpoints)
    codes += codes & is_tie  # to the even code
    return codes


def _round(values: Floats, dtype: str) -> Floats:
    """Return positive values rounded to ``dtype``."""
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return values


def _encode(quotients: Floats, thresholds: list[np.float32]) -> Words:
    """Return the codes of quotients (values, groups), two to a byte. Changes ``quotients``."""
    is_larger = quotients < -thresholds[0]
    codes = is_larger.view(np.uint8) << 3
    np.abs(quotients, out=quotients)
    for threshold in thresholds:
        np.greater(quotients, threshold, out=is_larger)
        codes += is_larger.view(np.uint8)
    pairs: Words = codes[1::2] << 4
    pairs |= codes[0::2]
    return pairs

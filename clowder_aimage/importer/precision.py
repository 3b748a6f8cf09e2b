"""Conversion of float types, and detection of F32 values that are BF16.

Conversions round to nearest, ties to even (IEEE 754-2019, 4.3.1); NaN stays NaN. BF16 has no numpy
type, so it is handled as the upper half of the bits of a float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# The bits of infinity in BF16, without the sign.
_INFINITY = 0x7F80
# Set in a NaN with zeros in its upper half: truncated, it would become infinity.
_QUIET = 0x0040
_LARGEST = {"F16": "65504", "BF16": "3.39e38", "F32": "3.4e38"}
_WIDER = {
    "F16": "use bf16, which has the range of float32",
    "BF16": "use f32, which has a slightly larger range",
}
Values = npt.NDArray[Any]


def cast(data: memoryview, source: str, target: str) -> tuple[Values, int]:
    """Return values as the bits of ``target``, and the number of finite values beyond its range.

    ``source`` and ``target`` are safetensors dtypes; the array has a word for each value.
    """
    values = np.frombuffer(data, _NUMPY[source])
    if source == target:
        return values, 0
    if (source, target) == ("F32", "BF16") and is_bf16(data):
        return np.ascontiguousarray(np.frombuffer(data, "<u2")[1::2]), 0
    with np.errstate(over="ignore", invalid="ignore"):
        widened = widen(values, source)
        narrowed = _round_bf16(widened) if target == "BF16" else widened.astype(_NUMPY[target])
        return narrowed, _count_lost(widened, narrowed, target)


def _count_lost(wide: Values, narrow: Values, target: str) -> int:
    is_infinite = (narrow & 0x7FFF) == _INFINITY if target == "BF16" else np.isinf(narrow)
    return int(np.count_nonzero(is_infinite & np.isfinite(wide))) if is_infinite.any() else 0


def widen(values: Values, dtype: str) -> Values:
    """Return the values as float32, or float64 values unchanged."""
    if dtype == "BF16":
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values if dtype == "F64" else values.astype(np.float32, copy=False)


def _round_bf16(values: Values) -> Values:
    bits = (_round_to_odd(values) if values.dtype == np.float64 else values).view(np.uint32)
    upper = bits >> 16
    rounded = (bits + (0x7FFF + (upper & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    nan_bits = upper | np.where(upper & 0x7F, 0, _QUIET).astype(np.uint32)
    return np.where(is_nan, nan_bits, rounded).astype(np.uint16)


def _round_to_odd(values: Values) -> Values:
    """Return float64 rounded to odd float32: the last bit is set if the conversion is inexact.

    A second rounding is then as exact as a single one. Source: Boldo and Melquiond, "When double
    rounding is odd".
    """
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32).copy()
    is_inexact = np.isfinite(nearest) & (nearest.astype(np.float64) != values)
    is_above = is_inexact & (np.abs(nearest.astype(np.float64)) > np.abs(values))
    bits -= is_above.astype(np.uint32)
    odd: Values = (bits | is_inexact.astype(np.uint32)).view(np.float32)
    return odd


def build_overflow_error(name: str, count: int, target: str) -> ModelError:
    """Return the error for values beyond the range of a type."""
    values = "1 value" if count == 1 else f"{count} values"
    return ModelError(
        f"{values} of {name[:200]} cannot be stored as {target} (maximum {_LARGEST[target]})",
        hint=_WIDER.get(target, "no supported type has a larger range: keep the original dtype"),
    )


def is_bf16(data: memoryview) -> bool:
    """Return True if each float32 is a BF16: the lower halves of all words are zero."""
    return not np.frombuffer(data, "<u2")[::2].any()

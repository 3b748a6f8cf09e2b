"""What quantizing would ruin without a word: values out of a type's reach, at either end.

Every type ends somewhere. nvfp4's scales go from 2**-9 to 448, in coarse steps below 2**-6; MLX's
affine scales are 1e-7 at least, and in F16 lose bits below 2**-14. A group that is well below
becomes zeros, one that is above is cut off. That is what rounding is for a few small groups, and
the loss of the tensor for many. A single NaN or infinity spoils its group, or turns into a number.
So all values are looked at, and for some groups of each block it is measured how far codes are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError
from clowder_aimage.importer.precision import widened
from clowder_aimage.tensor import Quantization

MOST = 0.01  # of the groups that hold anything may become zero
SAMPLE = 256  # groups of a block that are measured, about: that takes 2 % of what quantizing does
FARTHEST: Mapping[str, float] = {"int8": 0.03, "mxfp8": 0.15, "int4": 0.25, "nvfp4": 0.3}
"""How far codes may be from a tensor's groups on average: the norm of the difference over that of
the group. Trained weights have 0.005, 0.03, 0.1 and 0.1, long tails and outliers up to three times
as much in int8, and twice in the others. These are some 2.5 to 6 times what is usual: only scales
that cannot follow their values get there."""
REACH: Mapping[str, float] = {
    "affine": 1.7e38,  # twice that, from the least value to the largest, is as far as float32 goes
    "nvfp4": 448.0 * 6.0,  # the largest scale times the largest code
    "mxfp8": 448.0 * 2.0**119,  # what is above rounds to infinity
}
"""The largest value of each of MLX's modes."""
_MX = ("mxfp4", "mxfp8")
_FINE_F16 = 2.0**-14  # F16 has all of its bits from there on
# The word that a value is in, its bits without the sign, those of infinity and those of 2**-118.
_BITS = {
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000, 9 << 23),
    "BF16": ("<u2", 0x7FFF, 0x7F80, 9 << 7),
    "F16": ("<u2", 0x7FFF, 0x7C00, 0),
}
_FURTHER = "use mxfp8, whose scales reach further"
Words = npt.NDArray[Any]


class QuantizationGuard:
    """Watches over one tensor, ``name``, while blocks of it are quantized from ``dtype``."""

    def __init__(self, name: str, dtype: str, quantization: Quantization) -> None:
        self._name = name
        self._dtype = dtype
        self._quantization = quantization
        self._word, self._mask, self._infinity, self._tiny = _BITS[dtype]
        self._is_mx = quantization.type.mode in _MX
        self._largest = _bits(REACH.get(quantization.type.mode, math.inf), dtype)
        self._coarse = _coarse(quantization, dtype)
        self._lost, self._groups = 0, 0
        self._off, self._off_small, self._measured = 0.0, 0.0, 0

    def admit(self, values: Words) -> Words:
        """The values as they can be quantized.

        Raises:
            ModelError: some are not finite, or larger than the type can hold.
        """
        sizes = values.view(self._word) & self._mask
        largest = sizes.max() if sizes.size else 0
        if largest >= self._infinity:
            raise self._not_finite(int(np.count_nonzero(sizes >= self._infinity)))
        if largest > self._largest:
            raise self._too_large(int(np.count_nonzero(sizes > self._largest)))
        if not self._is_mx or not self._tiny:
            return values
        is_tiny = sizes < self._tiny
        if not sizes[is_tiny].any():
            return values
        # The exponent of such a group's scale is below that of E8M0, and MLX lets it wrap around:
        # values near 1e-37 would come back as 1e35 and more.
        words: Words = np.where(is_tiny, 0, values.view(self._word)).astype(self._word)
        return words.view(values.dtype)

    def look(self, values: Words, codes: bytes, scales: bytes, biases: bytes | None) -> None:
        """Count the groups of a block that became zeros. The mx types reach as far as float32."""
        if self._is_mx:
            return
        is_zero = self._zeros(codes, scales, biases)
        groups = values.view(self._word).reshape(is_zero.size, -1)
        lost = int(np.count_nonzero((groups[is_zero] & self._mask).any(axis=1)))
        self._lost += lost
        self._groups += lost + is_zero.size - int(np.count_nonzero(is_zero))

    def step(self, values: Words) -> int:
        """One of how many groups of a block is to be measured."""
        groups: int = values.size // self._quantization.group_size
        return groups // SAMPLE | 1  # odd: rows have an even number of groups, most of them

    def measure(self, values: Words, restored: Words) -> None:
        """See how far some groups of a block, one of ``step``, are from what their codes stand
        for: ``restored``, as float32 (groups, values)."""
        groups = values.reshape(-1, self._quantization.group_size)[:: self.step(values)]
        true = widened(groups, self._dtype).astype(np.float64)
        with np.errstate(all="ignore"):
            norms = np.square(true).sum(axis=1)
            off = np.sqrt(np.square(restored - true).sum(axis=1) / norms)[norms > 0]
        off[~np.isfinite(off)] = np.inf
        is_small = np.abs(true).max(axis=1)[norms > 0] < self._coarse
        self._off += float(off.sum())
        self._off_small += float(off[is_small].sum())
        self._measured += len(off)

    def _zeros(self, codes: bytes, scales: bytes, biases: bytes | None) -> Words:
        """Which groups stand for zeros alone."""
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
        """Raises ModelError where too many groups became zeros, or all are too far off."""
        kind = self._quantization.type.name
        if self._lost > MOST * self._groups:
            share = 100 * self._lost / self._groups
            raise ModelError(
                f"the values of {self._name[:200]} are too small for {kind}: {share:.3g} % of its "
                "groups would become zero",
                hint=_FURTHER,
            )
        off = self._off / self._measured if self._measured else 0.0
        if off > FARTHEST.get(kind, math.inf):
            raise self._too_far(kind, off)

    def _too_far(self, kind: str, off: float) -> ModelError:
        if self._off_small <= self._off / 2:
            why, hint = f"cannot be {kind}", "keep it as it is, or use a type of more bits"
        else:
            why, hint = f"are too small for {kind}", _FURTHER
            if self._dtype == "F16":  # scales in F16, or computed in it
                hint = "use --dtype f32 with it, whose scales reach further"
        far = f"off by {100 * off:.3g} % on average" if math.isfinite(off) else "infinite"
        return ModelError(f"the values of {self._name[:200]} {why}: they would be {far}", hint=hint)

    def _too_large(self, count: int) -> ModelError:
        kind = self._quantization.type
        return ModelError(
            f"{_some(count, self._name)} too large for {kind.name}, which ends at "
            f"{REACH[kind.mode]:.4g}",
            hint=_FURTHER if kind.mode == "nvfp4" else _KEEP,
        )

    def _not_finite(self, count: int) -> ModelError:
        return ModelError(f"{_some(count, self._name)} NaN or infinite", hint=_KEEP)


_KEEP = "it cannot be quantized: keep it as it is, or mend the model"


def _some(count: int, name: str) -> str:
    values, are = ("1 value", "is") if count == 1 else (f"{count} values", "are")
    return f"{values} of {name[:200]} {are}"


def _bits(value: float, dtype: str) -> int:
    """The word of the largest value of ``dtype`` that is not above ``value``."""
    word, _, infinity, _ = _BITS[dtype]
    if dtype == "F16":
        return int(np.array(value, "<f2").view(word)) if value < 65504 else infinity
    with np.errstate(over="ignore"):
        bits = int(np.array(value, "<f4").view("<u4"))
    return bits >> 16 if dtype == "BF16" else bits


def _coarse(quantization: Quantization, dtype: str) -> float:
    """Groups whose values are all below have scales that cannot follow them well."""
    kind = quantization.type
    if kind.has_bias:
        steps = (1 << kind.bits) - 1
        return (_FINE_F16 if dtype == "F16" else 2e-7) * steps
    if kind.mode == "nvfp4":
        return 6 * 2.0**-6
    return _FINE_F16 if dtype == "F16" else 0.0

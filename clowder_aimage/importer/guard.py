"""What quantizing would ruin without a word: values that are not finite, and groups that vanish.

Every type ends somewhere. nvfp4's least scale is 2**-9, of MLX's affine types it is 1e-7: a group
that is well below becomes zeros. That is what rounding is for a few groups, and the loss of the
tensor for many. A single NaN or infinity spoils its group, or turns into a number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError
from clowder_aimage.tensor import Quantization

MOST = 0.01  # of the groups that hold anything may become zero
_MX = ("mxfp4", "mxfp8")
# The word that a value is in, its bits without the sign, those of infinity and those of 2**-118.
_BITS = {
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000, 9 << 23),
    "BF16": ("<u2", 0x7FFF, 0x7F80, 9 << 7),
    "F16": ("<u2", 0x7FFF, 0x7C00, 0),
}
Words = npt.NDArray[Any]


class Guard:
    """Watches over one tensor, ``name``, while blocks of it are quantized from ``dtype``."""

    def __init__(self, name: str, dtype: str, quantization: Quantization) -> None:
        self._name = name
        self._quantization = quantization
        self._word, self._mask, self._infinity, self._tiny = _BITS[dtype]
        self._is_mx = quantization.type.mode in _MX
        self._lost, self._groups = 0, 0

    def admit(self, values: Words) -> Words:
        """The values as they can be quantized.

        Raises:
            ModelError: some are not finite.
        """
        sizes = values.view(self._word) & self._mask
        if sizes.size and sizes.max() >= self._infinity:
            raise self._not_finite(int(np.count_nonzero(sizes >= self._infinity)))
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
        """Raises ModelError where too many groups became zeros."""
        if self._lost > MOST * self._groups:
            kind, share = self._quantization.type.name, 100 * self._lost / self._groups
            raise ModelError(
                f"the values of {self._name[:200]} are too small for {kind}: {share:.3g} % of its "
                "groups would become zero",
                hint="use mxfp8, whose scales reach further",
            )

    def _not_finite(self, count: int) -> ModelError:
        values = "1 value" if count == 1 else f"{count} values"
        are = "is" if count == 1 else "are"
        return ModelError(
            f"{values} of {self._name[:200]} {are} NaN or infinite",
            hint="it cannot be quantized: keep it as it is, or mend the model",
        )

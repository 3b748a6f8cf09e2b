"""The rounding of a picture's numbers: what decides it, and how far two pictures differ by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

# The forms in which layers are computed; mixed: some of them in either form
EAGER, COMPILED, MIXED = "eager", "compiled", "mixed"
# Of 255: in float32, and for pictures of a batch (tests/parity)
_EXACT = 1
# Measured at 1024 x 1024 in bfloat16 on an H100: MLX and PyTorch 9, PyTorch and diffusers 6
_BFLOAT16 = 9


def merge_forms(forms: Collection[str]) -> str:
    """Return the form of a picture by those of its parts."""
    if len(set(forms)) > 1:
        return MIXED
    return next(iter(forms), EAGER)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The computation of a picture: library with version and device, form, type, batch."""

    backend: str
    forward: str
    dtype: str
    batch: int

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Rounding:
        """Return that of a picture; what it does not state is eager, and alone."""
        batch = metadata.get("batch", 1)
        return cls(
            str(metadata.get("backend", "")),
            str(metadata.get("forward", EAGER)),
            str(metadata.get("dtype", "")),
            batch if type(batch) is int else 1,
        )

    def compute_bound(self, other: Rounding) -> int:
        """Return the largest difference that was measured, of 255; 0 if both round alike."""
        if self == other and self.forward != MIXED:
            return 0
        is_exact = self.dtype == other.dtype == "float32"
        is_batch = replace(self, batch=1) == replace(other, batch=1)
        return _EXACT if is_exact or is_batch else _BFLOAT16

    def __str__(self) -> str:
        parts = [self.backend or "an unknown library"]
        parts += [self.forward] if self.forward != EAGER else []
        parts += [self.dtype] if self.dtype else []
        parts += [f"{self.batch} at once"] if self.batch > 1 else []
        return ", ".join(parts)

"""Rotary modules of networks: what mlx-lm's have in common, and one with any frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.rope_config import Floats

# A difference of frequencies that rounding explains
_ROUNDING = 1e-4
# Classes of mlx-lm; the last one turns adjacent channels
_PLAIN = ("RoPE", "DynamicNTKScalingRoPE")
_ADJACENT = ("DeepseekV2YarnRotaryEmbedding",)
_SCALED = ("Llama3RoPE", "YarnRoPE", "SuScaledRoPE", "ScaledRope", *_ADJACENT)


class ScaledRope(Network):
    """Rotates by given frequencies, and multiplies what is rotated by ``scale``.

    frequencies: (channels / 2,) in radians per position. Other channels stay.
    """

    def __init__(self, frequencies: Floats, scale: float, *, traditional: bool) -> None:
        super().__init__()
        self.dims, self.mscale, self.traditional = 2 * len(frequencies), scale, traditional
        # MLX wants positions per radian
        self._freqs = mx.array(1 / frequencies)

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Return x rotated. x: (..., length, channels) from position ``offset``."""
        if self.mscale != 1:
            x = x.at[..., : self.dims].multiply(self.mscale)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary module of mlx-lm: frequencies and scale. A traditional one turns adjacent pairs."""

    frequencies: Floats
    scale: float
    traditional: bool
    is_plain: bool

    @classmethod
    def read(cls, module: Any) -> Rotary | None:
        """Return a module's numbers; None if it is of another kind."""
        name = type(module).__name__
        if name in _PLAIN:
            scale = getattr(module, "scale", 1.0)
            frequencies = scale / module.base ** (np.arange(0, module.dims, 2) / module.dims)
            is_plain = scale == 1
            return cls(np.asarray(frequencies, np.float32), 1.0, module.traditional, is_plain)
        if name not in _SCALED:
            return None
        scale = getattr(module, "mscale", getattr(module, "_scale", 1.0))
        frequencies = 1 / np.array(module["_freqs"], dtype=np.float64)
        traditional = getattr(module, "traditional", name in _ADJACENT)
        return cls(np.asarray(frequencies, np.float32), float(scale), traditional, is_plain=False)

    def is_close(self, frequencies: Floats, scale: float) -> bool:
        """Return True if the positions are these, but for rounding."""
        return (
            len(self.frequencies) == len(frequencies)
            and math.isclose(self.scale, scale, rel_tol=_ROUNDING)
            and np.allclose(self.frequencies, frequencies, rtol=_ROUNDING, atol=0)
        )

"""Rotary positions on a CPU. MLX computes the angles again for each layer and each token.

On a CPU ``mx.fast.rope`` is some twenty operations. With known angles it is four, and all layers of
a step share them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.backend import mx
from clowder_aimage.model.compute.array_block import is_slow
from clowder_aimage.model.mlxlm.rotary import Rotary


class RotaryAngles:
    """The cosines and sines of a range of positions; the last range is kept.

    frequencies: (channels / 2,) in radians per position. scale: of what is rotated.
    """

    def __init__(self, frequencies: npt.NDArray[np.float32], scale: float = 1.0) -> None:
        self._frequencies, self._scale = frequencies, np.float32(scale)
        self._span: tuple[int | tuple[int, ...], int] = (-1, -1)
        self._angles = (mx.array(0.0), mx.array(0.0))

    def rotate(self, x: mx.array, offset: int | tuple[int, ...]) -> mx.array:
        """Return x rotated by its positions. x: (..., length, channels) from position ``offset``.

        x of several texts, (texts, heads, length, channels), begins at several. Channels beyond
        those that have frequencies stay.
        """
        half, span = len(self._frequencies), (offset, x.shape[-2])
        if span != self._span:
            self._span, self._angles = span, self._compute(*span)
        cosines, sines = self._angles
        unrotated = None
        if x.shape[-1] > 2 * half:
            x, unrotated = x[..., : 2 * half], x[..., 2 * half :]
        rotated = x * cosines + mx.roll(x, half, -1) * sines
        return rotated if unrotated is None else mx.concatenate([rotated, unrotated], axis=-1)

    def _compute(self, offset: int | tuple[int, ...], length: int) -> tuple[mx.array, mx.array]:
        positions = np.arange(length, dtype=np.float32)[:, None]
        if isinstance(offset, tuple):
            positions = positions + np.array(offset, np.float32)[:, None, None, None]
        else:
            positions += offset
        angles = positions * self._frequencies
        cosines, sines = np.cos(angles) * self._scale, np.sin(angles) * self._scale
        cosines, sines = np.concatenate((cosines, cosines), -1), np.concatenate((-sines, sines), -1)
        return mx.array(cosines), mx.array(sines)


def share_angles(network: Any) -> None:
    """Replace the rotary positions of a network; those with equal frequencies share angles."""
    shared: dict[tuple[bytes, float], RotaryAngles] = {}
    for module in network.modules():
        rotary = Rotary.read(module)
        if rotary is None or rotary.traditional:
            continue
        key = rotary.frequencies.tobytes(), rotary.scale
        angles = shared.setdefault(key, RotaryAngles(rotary.frequencies, rotary.scale))
        # Only the class changes, so that parameters keep their names for loading
        module.__class__ = _create_subclass(type(module), angles)


def _create_subclass(usual: Any, angles: RotaryAngles) -> type:
    def rotate(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        if isinstance(offset, mx.array) and offset.ndim == 1:
            starts: Any = tuple(offset.tolist())  # type: ignore[arg-type]
        else:
            starts = offset
        if isinstance(starts, int | tuple) and is_slow(x):
            return angles.rotate(x, starts)
        rotated: mx.array = usual.__call__(self, x, offset=offset)
        return rotated

    return type(f"Shared{usual.__name__}", (usual,), {"__call__": rotate})

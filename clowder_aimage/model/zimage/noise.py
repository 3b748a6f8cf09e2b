"""The noise that PyTorch's CPU generator makes, without PyTorch.

The same seed gives the same picture as the reference. ``torch.randn`` on a CPU draws from
MT19937 and turns uniforms into normals (Box-Muller), eight pairs at a time from 16 numbers; below
16 numbers it goes one pair at a time in double precision. Its vector instructions approximate
logarithm and cosine, so single values may differ in the last bit (5e-7 at most).
Reference: PyTorch, aten/src/ATen/native/cpu/DistributionTemplates.h and core/MT19937RNGEngine.h.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

BLOCK = 16


def randn(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """What ``torch.randn(shape, generator=torch.Generator().manual_seed(seed))`` returns.

    seed: a whole number, of which the low 32 bits count.
    """
    source = np.random.RandomState(seed & 0xFFFFFFFF)
    size = math.prod(shape)
    values = _few(source, size) if size < BLOCK else _many(source, size)
    return values.reshape(shape)


def _words(source: np.random.RandomState, count: int) -> npt.NDArray[np.uint32]:
    return source.randint(0, 1 << 32, size=count, dtype=np.uint32)


def _many(source: np.random.RandomState, size: int) -> npt.NDArray[np.float32]:
    """Whole blocks of 16; a rest is covered by one more block over the last 16 numbers."""
    uniforms = _uniforms(source, size)
    whole = size - size % BLOCK
    uniforms[:whole] = _box_muller(uniforms[:whole])
    if whole < size:
        uniforms[-BLOCK:] = _box_muller(_uniforms(source, BLOCK))
    return uniforms


def _uniforms(source: np.random.RandomState, count: int) -> npt.NDArray[np.float32]:
    """Multiples of 2**-24 in [0, 1)."""
    words = _words(source, count) & np.uint32((1 << 24) - 1)
    return words.astype(np.float32) * np.float32(2**-24)


def _box_muller(uniforms: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """In each block of 16, the first eight numbers give radii, the last eight angles."""
    blocks = uniforms.reshape(-1, 2, BLOCK // 2)
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - blocks[:, 0]))
    angle = np.float32(2 * math.pi) * blocks[:, 1]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.astype(np.float32).reshape(-1)


def _few(source: np.random.RandomState, size: int) -> npt.NDArray[np.float32]:
    """One pair at a time: angle from the first 53-bit uniform, radius from the second."""
    values: list[float] = []
    while len(values) < size:
        turn, rest = _double(source), _double(source)
        radius, angle = math.sqrt(-2 * math.log1p(-rest)), 2 * math.pi * turn
        values += [radius * math.cos(angle), radius * math.sin(angle)]
    return np.array(values[:size], dtype=np.float32)


def _double(source: np.random.RandomState) -> float:
    """A multiple of 2**-53 in [0, 1) from two words, the high one first."""
    high, low = (int(word) for word in _words(source, 2))
    return ((high << 32 | low) & ((1 << 53) - 1)) * 2.0**-53

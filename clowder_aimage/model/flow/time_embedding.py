"""Sinusoidal features of a time, as in diffusers, models/embeddings.py."""

from __future__ import annotations

import math

import numpy as np

FREQUENCIES = 256  # features


def sinusoid(time: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the 256 features of a time, from float32 angles; cosines and sines are rounded once.

    Two of the frequencies are rounded up, as by the float32 exponential of the reference.
    """
    half = FREQUENCIES // 2
    exponents = np.float32(-math.log(10000.0)) * np.arange(half, dtype=np.float32)
    frequencies = np.exp((exponents / np.float32(half)).astype(np.float64)).astype(np.float32)
    frequencies[[12, 106]] = np.nextafter(frequencies[[12, 106]], np.float32(2))
    angles = (np.float32(time) * frequencies).astype(np.float64)
    return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)

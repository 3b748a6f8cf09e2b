"""Sinusoidal features of a time, as in diffusers, models/embeddings.py."""

from __future__ import annotations

import math

import numpy as np

# Features of a time: half are cosines, half sines
FREQUENCIES = 256


def embed_time(time: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the 256 features of a time, from float32 angles, each rounded once."""
    half = FREQUENCIES // 2
    exponents = np.float32(-math.log(10000.0)) * np.arange(half, dtype=np.float32)
    frequencies = np.exp((exponents / np.float32(half)).astype(np.float64)).astype(np.float32)
    # The float32 exponential of the reference rounds these two up
    frequencies[[12, 106]] = np.nextafter(frequencies[[12, 106]], np.float32(2))
    angles = (np.float32(time) * frequencies).astype(np.float64)
    return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)

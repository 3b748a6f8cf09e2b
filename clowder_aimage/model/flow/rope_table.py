"""Tables of rotary position embeddings, in numpy: the same values for every library and device.

Angles are computed as in the references: in float64 (FLUX.2), rounded to float32 (Z-Image), or in
float32 (Qwen). Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.rope_config import RopeConfig

Floats = npt.NDArray[np.float32]
# Cosines and sines
FloatTable = tuple[Floats, Floats]


def compute_table(angles: npt.NDArray[np.floating[Any]], scale: float = 1.0) -> FloatTable:
    """Return cosine and sine of angles, each rounded once, times ``scale``."""
    exact = angles.astype(np.float64)
    cosines = np.cos(exact).astype(np.float32) * np.float32(scale)
    sines = np.sin(exact).astype(np.float32) * np.float32(scale)
    return cosines, sines


def compute_text_table(config: RopeConfig, length: int) -> FloatTable:
    """Return tables of shape (length, dim / 2) for the positions 0 to length - 1."""
    return compute_table(config.compute_angles(length), config.attention_factor)


def compute_axes_table(
    positions: npt.NDArray[np.int64],
    axes_dims: tuple[int, ...],
    theta: float,
    *,
    is_exact: bool = False,
) -> FloatTable:
    """Return tables (length, sum(axes_dims) / 2) for positions of shape (length, axes).

    Angles are rounded to float32, unless ``is_exact``.
    """
    angles = []
    for axis, dim in enumerate(axes_dims):
        frequencies = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        angles.append(np.outer(positions[:, axis].astype(np.float64), frequencies))
    joined = np.concatenate(angles, axis=1)
    return compute_table(joined if is_exact else joined.astype(np.float32))

"""Positions of pixels of a picture, for rotary embeddings of several axes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def place_pixels(positions: npt.NDArray[np.int64], height: int, width: int) -> None:
    """Write row and column, row by row, to the columns 1 and 2 of positions of a picture."""
    positions[:, 1] = np.repeat(np.arange(height), width)
    positions[:, 2] = np.tile(np.arange(width), height)

"""Pixels of pictures, from the values of a decoder."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError


def to_pixels(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Convert values from 0 to 1 to bytes: times 255 in float32, rounded half to even.

    Raises ModelError: a value is NaN.
    """
    # Clipping does not remove NaN, and a cast to bytes would hide it in a black picture
    check_numbers(is_finite=bool(np.isfinite(values).all()))
    return (np.clip(values, 0, 1) * np.float32(255)).round().astype(np.uint8)


def check_numbers(*, is_finite: bool) -> None:
    """Raise ModelError unless all values of a picture are numbers."""
    if not is_finite:
        raise ModelError("the model computed NaN or infinite values")


def downsample(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return a picture at half its size; each pixel is the mean of four."""
    height, width, colours = pixels.shape
    quarters = pixels.reshape(height // 2, 2, width // 2, 2, colours)
    mean: npt.NDArray[np.uint8] = quarters.mean(axis=(1, 3)).round().astype(pixels.dtype)
    return mean

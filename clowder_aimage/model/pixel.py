"""Pixels of pictures in arrays, in little memory: pictures are large, and many are needed at once.

Pillow keeps four bytes of each pixel, and copies all of them where arrays are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
_STRIP = 64  # rows


def list_strips(height: int) -> Iterator[slice]:
    """Yield the rows of a picture in strips."""
    return (slice(top, min(height, top + _STRIP)) for top in range(0, height, _STRIP))


def crop_strip(image: Image.Image, rows: slice) -> Image.Image:
    """Return rows of a picture."""
    return image.crop((0, rows.start, image.width, rows.stop))


def convert(image: Image.Image, mode: str) -> Image.Image:
    """Return a picture in a mode: itself if it has it already."""
    return image if image.mode == mode else image.convert(mode)


def to_pixels(image: Image.Image) -> Pixels:
    """Return a picture in RGB as (height, width, 3), one in grey as (height, width)."""
    depth = (3,) if image.mode == "RGB" else ()
    pixels = np.empty((image.height, image.width, *depth), np.uint8)
    for rows in list_strips(image.height):
        pixels[rows] = np.asarray(crop_strip(image, rows))
    return pixels


def build_pixels(like: Pixels, compute: Callable[[slice], npt.NDArray[np.float32]]) -> Pixels:
    """Return a picture of the shape of another; ``compute`` returns numbers of some rows."""
    pixels = np.empty_like(like)
    for rows in list_strips(len(like)):
        pixels[rows] = compute(rows).round()
    return pixels

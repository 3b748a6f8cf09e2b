"""Pictures fitted to a size, as diffusers does: by Lanczos.

No picture on the way has more pixels than the source and the target together.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from clowder_aimage.model.pixel import to_pixels

Picture = Image.Image
Size = tuple[int, int]


def fit(image: Picture, size: Size, mode: str) -> Picture:
    """Return a picture of ``size``.

    It is cropped to its proportions, padded with its edge, or stretched.
    """
    if image.size == size:
        return image
    if mode == "stretch":
        return resize(image, size)
    choose = max if mode == "crop" else min
    factor = choose(size[0] / image.width, size[1] / image.height)
    scaled = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return _crop(image, scaled, size) if mode == "crop" else _pad(resize(image, scaled), size)


def resize(image: Picture, size: Size) -> Picture:
    """Return a picture of ``size``."""
    (width, height), (across, down) = image.size, size
    # Before version 13, Pillow resizes the sides in this order, whatever it costs
    if across * height > width * height + across * down:
        image = image.resize((width, down), Image.Resampling.LANCZOS)
    return image.resize(size, Image.Resampling.LANCZOS)


def _crop(image: Picture, scaled: Size, size: Size) -> Picture:
    """Return the middle, of ``size``, of a picture that is resized to ``scaled``."""
    left, top = ((whole - part + 1) // 2 for whole, part in zip(scaled, size, strict=True))
    if math.prod(scaled) <= math.prod(image.size) + math.prod(size):
        return resize(image, scaled).crop((left, top, left + size[0], top + size[1]))
    across, down = image.width / scaled[0], image.height / scaled[1]
    box = (
        left * across,
        top * down,
        min(image.width, (left + size[0]) * across),
        min(image.height, (top + size[1]) * down),
    )
    return image.resize(size, Image.Resampling.LANCZOS, box)


def _pad(image: Picture, size: Size) -> Picture:
    left, top = (size[0] - image.width) // 2, (size[1] - image.height) // 2
    sides = [(top, size[1] - image.height - top), (left, size[0] - image.width - left)]
    pixels = to_pixels(image)
    # The padding of a mask is painted
    if image.mode == "L":
        return Image.fromarray(np.pad(pixels, sides, constant_values=255))
    return Image.fromarray(np.pad(pixels, [*sides, (0, 0)], mode="edge"))

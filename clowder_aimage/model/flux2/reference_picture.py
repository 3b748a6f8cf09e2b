"""Reference pictures as inputs of FLUX.2: at most a megapixel, cut to whole latents.

Source: diffusers, pipelines/flux2/image_processor.py and pipeline_flux2_klein.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import REFERENCE_PIXELS
from clowder_aimage.model.flow.array_library import ArrayLibrary, Floats
from clowder_aimage.model.flow.pixel_position import place_pixels
from clowder_aimage.model.flux2.config import AXES

_LEAST = 64  # pixels
# The largest ratio of the sides
_RATIO = 8
# Between the positions of reference pictures, as in diffusers
_APART = 10

Pixels = npt.NDArray[np.uint8]
# Picture, row, column and 0 of each token
Positions = npt.NDArray[np.int64]


def compute_reference_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of a picture after scaling: unchanged up to a megapixel.

    Raises:
        UsageError: It is too small or too narrow.
    """
    if min(width, height) < _LEAST:
        raise UsageError(
            f"a reference picture has {width} x {height} pixels: each side must have at least "
            f"{_LEAST}"
        )
    if max(width, height) > _RATIO * min(width, height):
        raise UsageError(
            f"a reference picture has {width} x {height} pixels: one side may be at most {_RATIO} "
            "times the other"
        )
    if width * height <= REFERENCE_PIXELS:
        return width, height
    scale = math.sqrt(REFERENCE_PIXELS / (width * height))
    return int(width * scale), int(height * scale)


def fit_reference(pixels: Pixels, multiple: int) -> Pixels:
    """Return a picture (height, width, 3), scaled down and cut to multiples of ``multiple``.

    Raises:
        UsageError: It is too small or too narrow.
    """
    height, width, _ = pixels.shape
    size = compute_reference_size(width, height)
    if size != (width, height):
        picture = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
        pixels = np.asarray(picture)
    width, height = (side // multiple * multiple for side in size)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return pixels[top : top + height, left : left + width]


def build_positions(picture: int, height: int, width: int) -> Positions:
    """Return the positions of the latents of a picture, row by row."""
    positions = np.zeros((height * width, AXES), dtype=np.int64)
    positions[:, 0] = picture
    place_pixels(positions, height, width)
    return positions


def place_words(length: int) -> Positions:
    """Return the positions of the tokens of a text, which count along the last axis."""
    positions = np.zeros((length, AXES), dtype=np.int64)
    positions[:, AXES - 1] = np.arange(length)
    return positions


def to_tokens(latents: Any) -> Any:
    """Return latents (channels, height, width) as tokens (height * width, channels).

    They are an array of numpy, MLX or PyTorch.
    """
    return latents.reshape(len(latents), -1).T


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceTokens:
    """Latents of reference pictures: (length, channels), and their positions (length, 4)."""

    # An array of the library
    tokens: Any
    positions: Positions

    @classmethod
    def of(cls, pictures: Sequence[Floats], library: ArrayLibrary) -> ReferenceTokens:
        """Return the tokens of latents (channels, height, width) of any sizes."""
        tokens = np.concatenate([to_tokens(picture) for picture in pictures])
        # Position 0 is that of the generated picture
        positions = [
            build_positions(_APART * n, *latents.shape[1:]) for n, latents in enumerate(pictures, 1)
        ]
        return cls(library.to_array(tokens), np.concatenate(positions))

"""Pictures larger than what is generated at once: new areas around them, and overlapping tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
SEAM = 32  # pixels of a picture that are painted again where it is expanded
_FLAT = 4  # levels by which an enlarged picture may change where it is flat
_CONTRAST = 0.5  # part of the deviation from the mean around a pixel, by which it may change more
_STEP = 64  # of the sides of tiles: a multiple of what models require
_OVERLAP = 4  # part of a tile's side that overlaps: one divided by this


def new_area(width: int, height: int, expand: Sequence[int]) -> Floats:
    """Return the share of new pixels in a picture that is expanded, (height, width).

    expand: the pixels added to the left, top, right and bottom. The share is 1 there, and falls to
    0 over the next SEAM pixels of the picture.
    """
    left, top, right, bottom = expand
    rows, columns = _distance(height, top, bottom), _distance(width, left, right)
    return np.maximum(rows[:, None], columns[None])


def _distance(length: int, before: int, after: int) -> Floats:
    """Return the share along one side of a picture of ``length`` pixels."""
    places = np.arange(-before, length + after, dtype=np.float32) + np.float32(0.5)
    seam = np.float32(min(SEAM, max(1, length // 4)))
    first = 1 - places / seam if before else np.zeros_like(places)
    last = 1 - (length - places) / seam if after else np.zeros_like(places)
    return np.clip(np.maximum(first, last), 0, 1)


def mix(made: Pixels, original: Pixels, share: Floats) -> Pixels:
    """Return pixels (height, width, 3) of which ``share`` (height, width) is from ``made``."""
    weight = share[..., None]
    return np.asarray((made * weight + original * (1 - weight)).round(), np.uint8)


def keep_shapes(made: Pixels, original: Pixels, cell: float) -> Pixels:
    """Return ``made`` with the colours and shapes of a picture of its size (height, width, 3).

    Of ``made`` remains what is finer than cells of ``cell`` pixels, and no more of it than a part
    of the contrast of the original there: a tile shows a part of a scene, and a model draws the
    whole scene of the prompt into it.
    """
    result = np.empty_like(made)
    for colour in range(made.shape[2]):  # all at once take much memory
        whole = original[..., colour].astype(np.float32)
        change = made[..., colour] - whole
        change -= _smooth(change, cell)
        variance = _smooth(whole * whole, cell) - _smooth(whole, cell) ** 2
        limit = _FLAT + _CONTRAST * np.sqrt(np.maximum(variance, 0))
        whole += np.clip(change, -limit, limit)
        result[..., colour] = np.clip(whole, 0, 255).round()
    return result


def _smooth(values: Floats, cell: float) -> Floats:
    """Return the means of cells, interpolated."""
    height, width = values.shape
    fewer = max(1, round(width / cell)), max(1, round(height / cell))
    means = Image.fromarray(values).resize(fewer, Image.Resampling.BOX)
    return np.asarray(means.resize((width, height), Image.Resampling.BICUBIC))


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Overlapping tiles of one size (width, height) that cover a picture.

    ``places`` has the first column and row of each tile. A picture that is smaller than a tile is
    padded to its right and bottom.
    """

    width: int
    height: int
    tile: tuple[int, int]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def cover(cls, width: int, height: int, largest: tuple[int, int]) -> TileGrid:
        """Return the tiles of a picture, up to ``largest``."""
        sides = (width, largest[0]), (height, largest[1])
        across, down = (min(most, -(-side // _STEP) * _STEP) for side, most in sides)
        places = [(x, y) for y in _starts(height, down) for x in _starts(width, across)]
        return cls(width, height, (across, down), tuple(places))

    def cut(self, picture: Pixels) -> list[Pixels]:
        """Return the tiles of a picture (height, width, 3)."""
        across, down = self.tile
        more = [(0, max(0, down - self.height)), (0, max(0, across - self.width)), (0, 0)]
        padded = np.pad(picture, more, mode="edge")
        return [padded[y : y + down, x : x + across] for x, y in self.places]

    def join(self, tiles: Sequence[Pixels]) -> Pixels:
        """Return the picture of its tiles, which are mixed linearly where they overlap."""
        across, down = self.tile
        shape = max(self.height, down), max(self.width, across), 1
        total, weights = np.zeros((*shape[:2], 3), np.float32), np.zeros(shape, np.float32)
        weight = (_ramp(down)[:, None] * _ramp(across)[None])[..., None]
        for (x, y), tile in zip(self.places, tiles, strict=True):
            total[y : y + down, x : x + across] += tile * weight
            weights[y : y + down, x : x + across] += weight
        total /= weights
        return np.asarray(total[: self.height, : self.width].round(), np.uint8)


def _starts(length: int, tile: int) -> list[int]:
    """Return the first pixels of tiles along a side: the last one ends where the picture does."""
    if length <= tile:
        return [0]
    count = -(-(length - tile) // (tile - tile // _OVERLAP)) + 1
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def _ramp(side: int) -> Floats:
    """Return weights that rise from the ends of a tile over the width of an overlap."""
    places = np.arange(side, dtype=np.float32) + np.float32(0.5)
    ends = np.minimum(places, side - places) / np.float32(max(1, side // _OVERLAP))
    return np.asarray(np.minimum(ends, 1), np.float32)

"""Pictures larger than one generation: new areas around them, and overlapping tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from clowder_aimage.model.pixel import Pixels, build_pixels, crop_strip, list_strips

Floats = npt.NDArray[np.float32]
# Pixels of a picture that are painted again where it is expanded
SEAM = 32
# An enlarged picture may change by these levels in flat areas
_FLAT = 4
# A pixel may change further by this share of the deviation around it
_CONTRAST = 0.5
# Sides of tiles are multiples of it: it is a multiple of all models' requirements
_STEP = 64
# A quarter of a tile's side overlaps
_OVERLAP = 4


def new_area(width: int, height: int, expand: Sequence[int]) -> Floats:
    """Return the share of new pixels in a picture that is expanded, (height, width).

    expand: the pixels added to the left, top, right and bottom. The share is 1 there, and falls to
    0 over the next SEAM pixels of the picture.
    """
    left, top, right, bottom = expand
    rows, columns = _compute_distance(height, top, bottom), _compute_distance(width, left, right)
    return np.maximum(rows[:, None], columns[None])


def _compute_distance(length: int, before: int, after: int) -> Floats:
    """Return the share along one side of a picture of ``length`` pixels."""
    positions = np.arange(-before, length + after, dtype=np.float32) + np.float32(0.5)
    seam = np.float32(min(SEAM, max(1, length // 4)))
    leading = 1 - positions / seam if before else np.zeros_like(positions)
    trailing = 1 - (length - positions) / seam if after else np.zeros_like(positions)
    return np.clip(np.maximum(leading, trailing), 0, 1)


def mix(generated: Pixels, original: Pixels, share: Floats) -> Pixels:
    """Mix two pictures (height, width, 3) with ``share`` (height, width) of ``generated``."""

    def compute(rows: slice) -> Floats:
        weight = share[rows, :, None]
        return generated[rows] * weight + original[rows] * (1 - weight)

    return build_pixels(original, compute)


def keep_shapes(generated: Pixels, original: Pixels, cell: float) -> Pixels:
    """Return ``generated`` with the colours and shapes of ``original`` (height, width, 3).

    Only frequencies above cells of ``cell`` pixels are taken from ``generated``, limited by the
    contrast of the original: a model draws the whole scene of the prompt into each tile.
    """
    result = np.empty_like(generated)
    # One colour at a time bounds the memory of float32 copies
    for colour in range(generated.shape[2]):
        result[..., colour] = _keep_shape(generated[..., colour], original[..., colour], cell)
    return result


def _keep_shape(generated: Pixels, original: Pixels, cell: float) -> Pixels:
    limit = _limit_change(original, cell)

    def compute_change(rows: slice) -> Floats:
        return np.asarray(generated[rows] - original[rows].astype(np.float32))

    smooth_change = _smooth(original, compute_change, cell)

    def compute(rows: slice) -> Floats:
        most = _to_floats(limit, rows)
        change = compute_change(rows) - _to_floats(smooth_change, rows)
        return np.asarray(np.clip(original[rows] + np.clip(change, -most, most), 0, 255))

    return build_pixels(original, compute)


def _limit_change(original: Pixels, cell: float) -> Image.Image:
    """Return the levels by which each pixel may change."""
    limit = _smooth(original, lambda rows: original[rows].astype(np.float32) ** 2, cell)
    smooth = _smooth(original, lambda rows: original[rows].astype(np.float32), cell)
    for rows in list_strips(len(original)):
        variance = _to_floats(limit, rows) - _to_floats(smooth, rows) ** 2
        levels = _FLAT + _CONTRAST * np.sqrt(np.maximum(variance, 0))
        limit.paste(Image.fromarray(levels), (0, rows.start))
    return limit


def _smooth(like: Pixels, compute: Callable[[slice], Floats], cell: float) -> Image.Image:
    """Return the means of cells, interpolated; ``compute`` returns numbers of some rows."""
    height, width = like.shape
    return _average(like, compute, cell).resize((width, height), Image.Resampling.BICUBIC)


def _average(like: Pixels, compute: Callable[[slice], Floats], cell: float) -> Image.Image:
    height, width = like.shape
    values = Image.new("F", (width, height))
    for rows in list_strips(height):
        values.paste(Image.fromarray(compute(rows)), (0, rows.start))
    fewer = max(1, round(width / cell)), max(1, round(height / cell))
    return values.resize(fewer, Image.Resampling.BOX)


def _to_floats(values: Image.Image, rows: slice) -> Floats:
    return np.asarray(crop_strip(values, rows), np.float32)


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Overlapping tiles of one size (width, height) that cover a picture.

    ``origins`` has the first column and row of each tile. A picture that is smaller than a tile is
    padded to its right and bottom.
    """

    width: int
    height: int
    tile: tuple[int, int]
    origins: tuple[tuple[int, int], ...]

    @classmethod
    def cover(cls, width: int, height: int, largest: tuple[int, int]) -> TileGrid:
        """Return the tiles of a picture, up to ``largest``."""
        sides = (width, largest[0]), (height, largest[1])
        across, down = (min(most, -(-side // _STEP) * _STEP) for side, most in sides)
        origins = [(x, y) for y in _starts(height, down) for x in _starts(width, across)]
        return cls(width, height, (across, down), tuple(origins))

    def cut(self, picture: Pixels) -> list[Pixels]:
        """Return the tiles of a picture (height, width, 3)."""
        across, down = self.tile
        padding = [(0, max(0, down - self.height)), (0, max(0, across - self.width)), (0, 0)]
        padded = np.pad(picture, padding, mode="edge") if np.any(padding) else picture
        return [padded[y : y + down, x : x + across] for x, y in self.origins]

    def join(self, tiles: Sequence[Pixels]) -> Pixels:
        """Return the picture of its tiles, with linear mixing in overlaps."""
        across, down = self.tile
        weight = (_compute_ramp(down)[:, None] * _compute_ramp(across)[None])[..., None]

        def compute(rows: slice) -> Floats:
            shape = rows.stop - rows.start, max(self.width, across), 1
            total, weights = np.zeros((*shape[:2], 3), np.float32), np.zeros(shape, np.float32)
            for (x, y), tile in zip(self.origins, tiles, strict=True):
                first, last = max(rows.start, y), min(rows.stop, y + down)
                if first < last:
                    place = slice(first - rows.start, last - rows.start), slice(x, x + across)
                    part = slice(first - y, last - y)
                    total[place] += tile[part] * weight[part]
                    weights[place] += weight[part]
            return np.asarray((total / weights)[:, : self.width], np.float32)

        return build_pixels(np.empty((self.height, self.width, 3), np.uint8), compute)


def _starts(length: int, tile: int) -> list[int]:
    """Return the first pixels of tiles along a side; the last tile ends at the edge."""
    if length <= tile:
        return [0]
    count = -(-(length - tile) // (tile - tile // _OVERLAP)) + 1
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def _compute_ramp(side: int) -> Floats:
    """Return weights that rise from the ends of a tile over the width of an overlap."""
    positions = np.arange(side, dtype=np.float32) + np.float32(0.5)
    ends = np.minimum(positions, side - positions) / np.float32(max(1, side // _OVERLAP))
    return np.asarray(np.minimum(ends, 1), np.float32)

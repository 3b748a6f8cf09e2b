"""Recognition of the shapes in a picture from its pixels alone, without its caption.

Soft edges, noise and slightly wrong colours are tolerated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scene import BACKGROUNDS, COLOURS, RGB, SHAPES, Item, coverage, outline

Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]

FOREGROUND = 45.0  # minimum RGB distance of a shape's pixel from the background
OFF = 60.0  # maximum RGB distance of a background from its named colour
SPECK = 0.006  # minimum area of an item, as a share of the squared shorter side
LIKE = 0.65  # minimum overlap of a shape with its outline
NONE = "none"


@dataclass(frozen=True)
class SeenItem:
    """Colour and shape by name; a colour may be one of BACKGROUNDS, a shape "none"."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Seen:
    """The name of the background, or "none", and the items."""

    background: str
    items: tuple[SeenItem, ...]
    width: int
    height: int


# --- looking ----------------------------------------------------------------------------------


def look(picture: NDArray[np.uint8], colours: Mapping[str, RGB] = COLOURS) -> Seen:
    """Return the contents of a picture (height, width, 3); the items by descending size.

    The colour of an item is the nearest of ``colours`` and BACKGROUNDS.
    """
    pixels = np.asarray(picture, dtype=np.float32)
    height, width = pixels.shape[:2]
    ground = _border_colour(pixels)
    smallest = SPECK * min(width, height) ** 2
    far = np.linalg.norm(pixels - ground, axis=2) > FOREGROUND
    items = []
    for part in _components(far, smallest):
        for piece in _by_colour(pixels, part, colours):
            items += _items(pixels, ground, piece, part & ~piece, smallest, colours)
    items.sort(key=lambda item: -item.radius)
    return Seen(_background(ground), tuple(items), width, height)


def _border_colour(pixels: Floats) -> Floats:
    sides = (pixels[:2], pixels[-2:], pixels[2:-2, :2], pixels[2:-2, -2:])
    colour: Floats = np.median(np.concatenate([side.reshape(-1, 3) for side in sides]), axis=0)
    return colour


def _background(colour: Floats) -> str:
    # plain RGB: in a dark colour, a small change alters the hue
    palette = np.array(list(BACKGROUNDS.values()), dtype=np.float32)
    away = np.linalg.norm(palette - colour, axis=1)
    return list(BACKGROUNDS)[int(away.argmin())] if away.min() <= OFF else NONE


def _components(mask: Mask, smallest: float) -> Iterator[Mask]:
    """Yield the 4-connected components of a mask, without small ones."""
    height, width = mask.shape
    padded = np.zeros((height + 1, width + 1), dtype=np.uint8)  # separates the rows
    padded[:height, :width] = mask
    row = width + 1
    todo = bytearray(padded.tobytes())
    start = todo.find(1)
    while start >= 0:
        todo[start] = 0
        found = [start]
        for place in found:
            for near in (place - 1, place + 1, place - row, place + row):
                if near >= 0 and todo[near]:
                    todo[near] = 0
                    found.append(near)
        if len(found) >= smallest:
            part = np.zeros((height + 1) * row, dtype=np.bool_)
            part[found] = True
            yield part.reshape(height + 1, row)[:height, :width]
        start = todo.find(1, start)


def _by_colour(pixels: Floats, part: Mask, colours: Mapping[str, RGB]) -> list[Mask]:
    """Return one mask for each colour that fills an area of the part: shapes may touch.

    Blurred edges between shape and background are too thin to count, and so is noise.
    """
    core = _core(part)
    labels = np.full(part.shape, -1)
    labels[core] = _numbers(pixels[core], colours)
    least = max(8.0, 0.1 * float(core.sum()))
    middles: list[Floats] = []
    for number in range(len(colours)):
        piece = _shrunk(labels == number)
        if piece.sum() >= least:
            middles.append(np.median(pixels[piece], axis=0))
    if len(middles) < 2:
        return [part]
    nearest = np.linalg.norm(pixels[:, :, None] - np.stack(middles), axis=3).argmin(axis=2)
    return [part & (nearest == number) for number in range(len(middles))]


def _items(
    pixels: Floats,
    ground: Floats,
    part: Mask,
    others: Mask,
    smallest: float,
    colours: Mapping[str, RGB],
) -> list[SeenItem]:
    """Return the items of one colour in a part: several if only a faint bridge joins them."""
    colour: Floats = np.median(pixels[_core(part)], axis=0)
    line = colour - ground
    share = np.clip((pixels - ground) @ line / max(float(line @ line), 1.0), 0, 1)
    items = []
    for solid in _components(part & (share > 0.5), smallest):
        colour = np.median(pixels[_core(solid)], axis=0)
        covered = np.where(_grown(_grown(solid)) & ~others, share, 0)
        shape, fit = _fit(covered.astype(np.float32), solid)
        items.append(SeenItem(_name(colour, colours), shape, fit.x, fit.y, fit.radius))
    return items


def _core(part: Mask) -> Mask:
    """Return the part without its soft edge, unless nothing remains."""
    for _ in range(2):
        smaller = _shrunk(part)
        if smaller.sum() < 8:
            break
        part = smaller
    return part


def _shrunk(mask: Mask) -> Mask:
    return ~_grown(~mask)


def _grown(mask: Mask) -> Mask:
    grown = mask.copy()
    grown[1:] |= mask[:-1]
    grown[:-1] |= mask[1:]
    grown[:, 1:] |= mask[:, :-1]
    grown[:, :-1] |= mask[:, 1:]
    return grown


# --- colours ----------------------------------------------------------------------------------


def _lab(colours: Floats) -> Floats:
    """Convert sRGB colours (0 to 255) to CIELAB, where distances are about as perceived.

    Lightness has half weight: a shape that is too pale or too dark keeps its colour's name.
    """
    linear = np.asarray(colours, dtype=np.float32) / 255
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = linear @ to_xyz.T / np.array([0.9505, 1.0, 1.089])
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = root[..., 0], root[..., 1], root[..., 2]
    lab: Floats = np.stack([0.5 * (116 * y - 16), 500 * (x - y), 200 * (y - z)], axis=-1)
    return lab


def _name(colour: Floats, colours: Mapping[str, RGB]) -> str:
    known = {**colours, **BACKGROUNDS}
    palette = np.array(list(known.values()), dtype=np.float32)
    away = np.linalg.norm(_lab(palette) - _lab(colour), axis=1)
    return list(known)[int(away.argmin())]


def _numbers(values: Floats, colours: Mapping[str, RGB]) -> NDArray[np.intp]:
    """Return the index of the nearest of ``colours`` for each value."""
    palette = _lab(np.array(list(colours.values()), dtype=np.float32))
    away = np.linalg.norm(_lab(values)[:, None] - palette, axis=2)
    numbers: NDArray[np.intp] = away.argmin(axis=1)
    return numbers


# --- shapes -----------------------------------------------------------------------------------


def _fit(covered: Floats, solid: Mask) -> tuple[str, Item]:
    """Return the shape that best matches the covered area, sharp or blurred, and its position."""
    height, width = covered.shape
    best, best_item = -1.0, Item("", NONE, 0, 0, 0)
    for shape in SHAPES:
        for item in _guesses(shape, covered, solid):
            sharp = coverage(item, width, height)
            overlap = max(_overlap(sharp, covered), _overlap(_blurred(sharp), covered))
            if overlap > best:
                best, best_item = overlap, item
    return best_item.shape if best >= LIKE else NONE, best_item


def _overlap(one: Floats, two: Floats) -> float:
    return float(np.minimum(one, two).sum() / np.maximum(one, two).sum())


def _blurred(picture: Floats) -> Floats:
    """Blur over 2 to 3 pixels."""
    soft = picture
    for _ in range(2):
        rows = np.pad(soft, ((1, 1), (0, 0)), mode="edge")
        soft = 0.25 * rows[:-2] + 0.5 * soft + 0.25 * rows[2:]
        columns = np.pad(soft, ((0, 0), (1, 1)), mode="edge")
        soft = 0.25 * columns[:, :-2] + 0.5 * soft + 0.25 * columns[:, 2:]
    return soft


def _guesses(shape: str, covered: Floats, solid: Mask) -> list[Item]:
    """Return candidate positions of a shape.

    One has the same area and centre of gravity, which blur preserves; where the border cuts
    something off, others match the visible sides.
    """
    rows, columns = np.flatnonzero(solid.any(axis=1)), np.flatnonzero(solid.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = solid.shape
    if top > 0 and left > 0 and bottom < height and right < width:
        return [_same_area(shape, covered)]
    xs, ys = zip(*outline(shape), strict=True)
    across = (right - left) / (max(xs) - min(xs))
    down = (bottom - top) / (max(ys) - min(ys))
    guesses = []
    for radius in sorted({across, down, max(across, down) * 1.2, max(across, down) * 1.5}):
        x = right - radius * max(xs) if left == 0 else left - radius * min(xs)
        y = bottom - radius * max(ys) if top == 0 else top - radius * min(ys)
        guesses.append(Item("", shape, float(x), float(y), float(radius)))
    return guesses


def _same_area(shape: str, covered: Floats) -> Item:
    area, _, drop = _moments(shape)
    total = float(covered.sum())
    radius = (total / area) ** 0.5
    rows, columns = np.indices(covered.shape) + 0.5
    x = float((covered * columns).sum()) / total
    y = float((covered * rows).sum()) / total
    return Item("", shape, x, y - drop * radius, radius)


def _moments(shape: str) -> tuple[float, float, float]:
    """Return the area and centre of gravity of the outline of radius 1."""
    points = outline(shape)
    area = x_sum = y_sum = 0.0
    for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
        turn = x0 * y1 - x1 * y0
        area += turn / 2
        x_sum += (x0 + x1) * turn / 6
        y_sum += (y0 + y1) * turn / 6
    return abs(area), x_sum / area, y_sum / area

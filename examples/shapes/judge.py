"""What is on a picture of shapes, told from its pixels alone, and whether that was asked for.

`look` knows nothing of the caption; `score` compares what it saw with the scene; `figures` counts.
Soft edges, noise and colours that are somewhat off are forgiven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from scene import BACKGROUNDS, COLOURS, RGB, SHAPES, Item, Scene, coverage, outline

Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]

FOREGROUND = 45.0  # how far from the background, in RGB, a pixel of a shape is at least
OFF = 60.0  # a background is so near to its colour in RGB, or is none
SPECK = 0.006  # what covers less, as a share of the square of the shorter side, is no item
LIKE = 0.65  # a shape overlaps its outline so well, or is none
SMALL, LARGE = 0.205, 0.305  # radii, as shares of the shorter side
LOW, HIGH = 0.42, 0.58  # where left and top end, where right and bottom begin
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
    """The background by name, "none" where it is like none of them, and the items."""

    background: str
    items: tuple[SeenItem, ...]
    width: int
    height: int


@dataclass(frozen=True)
class Verdict:
    """What is right; None where the caption asks for nothing of the sort.

    `both` is stricter than colour and shape: each shape has its own colour.
    """

    colour: bool
    shape: bool
    both: bool
    count: bool | None
    relation: bool | None
    position: bool | None
    size: bool | None
    background: bool | None


# --- looking ----------------------------------------------------------------------------------


def look(picture: NDArray[np.uint8]) -> Seen:
    """What is on a picture of height, width, 3; the items from the largest to the smallest."""
    pixels = np.asarray(picture, dtype=np.float32)
    height, width = pixels.shape[:2]
    ground = _border_colour(pixels)
    smallest = SPECK * min(width, height) ** 2
    far = np.linalg.norm(pixels - ground, axis=2) > FOREGROUND
    items = []
    for part in _components(far, smallest):
        for piece in _by_colour(pixels, part):
            items += _items(pixels, ground, piece, part & ~piece, smallest)
    items.sort(key=lambda item: -item.radius)
    return Seen(_background(ground), tuple(items), width, height)


def _border_colour(pixels: Floats) -> Floats:
    sides = (pixels[:2], pixels[-2:], pixels[2:-2, :2], pixels[2:-2, -2:])
    colour: Floats = np.median(np.concatenate([side.reshape(-1, 3) for side in sides]), axis=0)
    return colour


def _background(colour: Floats) -> str:
    # plain RGB: of a dark colour, a small change turns the hue
    palette = np.array(list(BACKGROUNDS.values()), dtype=np.float32)
    away = np.linalg.norm(palette - colour, axis=1)
    return list(BACKGROUNDS)[int(away.argmin())] if away.min() <= OFF else NONE


def _components(mask: Mask, smallest: float) -> Iterator[Mask]:
    """The parts of a mask that hang together over the sides of pixels, without the specks."""
    height, width = mask.shape
    padded = np.zeros((height + 1, width + 1), dtype=np.uint8)  # so that no row runs into the next
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


def _by_colour(pixels: Floats, part: Mask) -> list[Mask]:
    """One mask for each colour that fills a piece of the part: shapes may touch each other.

    A fringe that blur mixed from shape and background is too thin to be a piece, and so is noise.
    """
    core = _core(part)
    labels = np.full(part.shape, -1)
    labels[core] = _numbers(pixels[core])
    least = max(8.0, 0.1 * float(core.sum()))
    middles: list[Floats] = []
    for number in range(len(COLOURS)):
        piece = _shrunk(labels == number)
        if piece.sum() >= least:
            middles.append(np.median(pixels[piece], axis=0))
    if len(middles) < 2:
        return [part]
    nearest = np.linalg.norm(pixels[:, :, None] - np.stack(middles), axis=3).argmin(axis=2)
    return [part & (nearest == number) for number in range(len(middles))]


def _items(
    pixels: Floats, ground: Floats, part: Mask, others: Mask, smallest: float
) -> list[SeenItem]:
    """The items of one colour in a part: more than one where only a faint bridge joins them."""
    colour: Floats = np.median(pixels[_core(part)], axis=0)
    line = colour - ground
    share = np.clip((pixels - ground) @ line / max(float(line @ line), 1.0), 0, 1)
    items = []
    for solid in _components(part & (share > 0.5), smallest):
        colour = np.median(pixels[_core(solid)], axis=0)
        covered = np.where(_grown(_grown(solid)) & ~others, share, 0)
        shape, fit = _fit(covered.astype(np.float32), solid)
        items.append(SeenItem(_name(colour), shape, fit.x, fit.y, fit.radius))
    return items


def _core(part: Mask) -> Mask:
    """The part without its soft edge, as far as there is something left."""
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
    """CIELAB of sRGB colours of 0 to 255, where distances are about those that people see.

    Lightness counts half: a shape that is too pale or too dark keeps its colour's name.
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


def _name(colour: Floats) -> str:
    known: dict[str, RGB] = {**COLOURS, **BACKGROUNDS}
    palette = np.array(list(known.values()), dtype=np.float32)
    away = np.linalg.norm(_lab(palette) - _lab(colour), axis=1)
    return list(known)[int(away.argmin())]


def _numbers(colours: Floats) -> NDArray[np.intp]:
    """For each colour the number of the nearest one in COLOURS."""
    palette = _lab(np.array(list(COLOURS.values()), dtype=np.float32))
    numbers: NDArray[np.intp] = np.linalg.norm(_lab(colours)[:, None] - palette, axis=2).argmin(
        axis=1
    )
    return numbers


# --- shapes -----------------------------------------------------------------------------------


def _fit(covered: Floats, solid: Mask) -> tuple[str, Item]:
    """The shape that overlaps best with what is covered, sharp or blurred, and where it stands."""
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
    """Soft over 2 to 3 pixels."""
    soft = picture
    for _ in range(2):
        rows = np.pad(soft, ((1, 1), (0, 0)), mode="edge")
        soft = 0.25 * rows[:-2] + 0.5 * soft + 0.25 * rows[2:]
        columns = np.pad(soft, ((0, 0), (1, 1)), mode="edge")
        soft = 0.25 * columns[:, :-2] + 0.5 * soft + 0.25 * columns[:, 2:]
    return soft


def _guesses(shape: str, covered: Floats, solid: Mask) -> list[Item]:
    """Where a shape would stand.

    That of the same area and the same centre of gravity, which blur does not move; where the
    border cuts something off, what fits the sides that can be seen.
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
    """Area and centre of gravity of the outline of radius 1."""
    points = outline(shape)
    area = x_sum = y_sum = 0.0
    for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
        turn = x0 * y1 - x1 * y0
        area += turn / 2
        x_sum += (x0 + x1) * turn / 6
        y_sum += (y0 + y1) * turn / 6
    return abs(area), x_sum / area, y_sum / area


# --- scoring ----------------------------------------------------------------------------------


def score(scene: Scene, seen: Seen) -> Verdict:
    """Which of the things that the caption asks for are on the picture."""
    asked = [item.pair for item in scene.items]
    found = [(item.colour, item.shape) for item in seen.items]
    if scene.kind == "count" and found:
        asked = asked[:1] * len(found)  # how many there are is judged on its own
    return Verdict(
        colour=_same((colour for colour, _ in asked), (colour for colour, _ in found)),
        shape=_same((shape for _, shape in asked), (shape for _, shape in found)),
        both=_same(asked, found),
        count=len(found) == len(scene.items) if scene.kind == "count" else None,
        relation=_related(scene, seen) if scene.relation else None,
        position=_placed(scene, seen) if scene.position else None,
        size=_sized(scene, seen) if scene.size else None,
        background=seen.background == scene.background if scene.background_said else None,
    )


def _same(asked: Iterable[object], found: Iterable[object]) -> bool:
    return Counter(asked) == Counter(found)


def _likeness(asked: Item, found: SeenItem) -> int:
    """3 for colour and shape, 2 for the colour alone, 1 for the shape alone."""
    return 2 * (asked.colour == found.colour) + (asked.shape == found.shape)


def _related(scene: Scene, seen: Seen) -> bool:
    """Whether the two items stand as asked, in each of the best ways to tell which is which."""
    one, two = scene.items
    best, right = 0, False
    for first, second in permutations(seen.items[:8], 2):
        likeness = _likeness(one, first), _likeness(two, second)
        if min(likeness) == 0 or sum(likeness) < best:
            continue
        stands = _stands(scene.relation, first, second)
        right = stands and (right or sum(likeness) > best)
        best = sum(likeness)
    return right


def _stands(relation: str | None, first: SeenItem, second: SeenItem) -> bool:
    across, down = second.x - first.x, second.y - first.y
    along = {"left": across, "right": -across, "above": down, "below": -down}[relation or ""]
    return along > 0 and along >= max(abs(across), abs(down))


def _meant(scene: Scene, seen: Seen) -> SeenItem | None:
    """The item that a caption of one shape speaks of: the most alike, else the largest."""
    return max(
        seen.items,
        key=lambda found: (_likeness(scene.items[0], found), found.radius),
        default=None,
    )


def _placed(scene: Scene, seen: Seen) -> bool:
    item = _meant(scene, seen)
    if item is None:
        return False
    down = _third(item.y / seen.height, "top", "bottom")
    across = _third(item.x / seen.width, "left", "right")
    return (f"{down} {across}".strip() or "centre") == scene.position


def _third(share: float, low: str, high: str) -> str:
    return low if share < LOW else high if share > HIGH else ""


def _sized(scene: Scene, seen: Seen) -> bool:
    item = _meant(scene, seen)
    if item is None:
        return False
    share = item.radius / min(seen.width, seen.height)
    return share < SMALL if scene.size == "small" else share > LARGE


# --- counting ---------------------------------------------------------------------------------


def figures(pairs: Iterable[tuple[Scene, Verdict]]) -> dict[str, dict[str, float | int | None]]:
    """For each figure how many are right, of how many, and the share: None of nothing."""
    verdicts: dict[str, list[bool]] = {name: [] for name in FIGURES}
    for scene, verdict in pairs:
        for name, right in _votes(scene, verdict).items():
            if right is not None:
                verdicts[name].append(right)
    return {
        name: {
            "right": sum(all_),
            "of": len(all_),
            "share": sum(all_) / len(all_) if all_ else None,
        }
        for name, all_ in verdicts.items()
    }


FIGURES = (
    "colour",
    "shape",
    "both",
    "both_trained",
    "both_left_out",
    "count",
    "left_right",
    "above_below",
    "position",
    "size",
    "background",
)


def _votes(scene: Scene, verdict: Verdict) -> dict[str, bool | None]:
    beside = scene.relation in ("left", "right")
    return {
        "colour": verdict.colour,
        "shape": verdict.shape,
        "both": verdict.both,
        "both_left_out" if scene.is_left_out else "both_trained": verdict.both,
        "count": verdict.count,
        "left_right" if beside else "above_below": verdict.relation,
        "position": verdict.position,
        "size": verdict.size,
        "background": verdict.background,
    }

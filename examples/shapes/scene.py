"""Drawn shapes and what is said of them: the data a tiny text-to-image model is trained on.

`compose` draws a scene by chance, with its caption; `render` makes the picture. A part of what can
be asked is held out: no training scene asks for it, so that a model cannot have learnt it by heart.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (215, 20, 40),
    "orange": (250, 120, 0),
    "yellow": (250, 225, 40),
    "green": (30, 160, 60),
    "cyan": (40, 205, 225),
    "blue": (20, 70, 230),
    "purple": (130, 40, 170),
    "pink": (255, 130, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
BACKGROUNDS: dict[str, RGB] = {
    "white": (255, 255, 255),
    "grey": (128, 128, 128),
    "black": (0, 0, 0),
    "brown": (96, 56, 24),
}
LEFT_OUT = (
    ("orange", "star"),
    ("cyan", "triangle"),
    ("purple", "square"),
    ("pink", "circle"),
    ("yellow", "cross"),
)
"""Never in training, neither alone nor beside something else."""

SIZES = tuple((width, height) for width in (64, 96, 128) for height in (64, 96, 128))
HELD_OUT_SCENES = 300
SCALE = 4  # pictures are drawn so many times larger, and reduced

NUMBERS = {2: "two", 3: "three", 4: "four"}
RADII = {"small": (0.15, 0.18), None: (0.23, 0.27), "large": (0.34, 0.38)}
PLACES = {
    "top left": ("in the top left corner", "at the top left"),
    "top": ("at the top",),
    "top right": ("in the top right corner", "at the top right"),
    "left": ("on the left", "on the left side"),
    "centre": ("in the centre", "in the middle"),
    "right": ("on the right", "on the right side"),
    "bottom left": ("in the bottom left corner", "at the bottom left"),
    "bottom": ("at the bottom",),
    "bottom right": ("in the bottom right corner", "at the bottom right"),
}
RELATIONS = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above",),
    "below": ("below", "under"),
}
GROUNDS = ("on a {} background", "on {}", "against a {} background", "with a {} background")
# where the items of a count stand, as shares of width and height
ARRANGEMENTS = {
    2: ((0.25, 0.5), (0.75, 0.5)),
    3: ((0.5, 0.25), (0.25, 0.75), (0.75, 0.75)),
    4: ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)),
}


@dataclass(frozen=True)
class Item:
    """One shape; centre and radius in pixels, y downwards. No shape reaches past its radius."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float

    @property
    def pair(self) -> tuple[str, str]:
        return self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """What is in a picture, and what its caption says of it: None where it does not say.

    `kind` is "one", "count" or "relation"; a relation is that of the first item to the second.
    A background that is not said is white.
    """

    width: int
    height: int
    background: str
    items: tuple[Item, ...]
    caption: str
    kind: str
    position: str | None = None
    size: str | None = None
    relation: str | None = None
    background_said: bool = False

    @property
    def is_left_out(self) -> bool:
        return any(item.pair in LEFT_OUT for item in self.items)


# --- what is held out -------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """What a caption asks for, however it is worded."""

    kind: str
    pairs: tuple[tuple[str, str], ...]
    background: str
    count: int = 1
    position: str | None = None
    size: str | None = None
    relation: str | None = None

    def describe(self) -> str:
        """Canonical: "a right of b" is written as "b left of a", "a below b" as "b above a"."""
        pairs, relation = self.pairs, self.relation
        if relation in ("right", "below"):
            pairs, relation = pairs[::-1], "left" if relation == "right" else "above"
        what = " ".join(f"{colour}-{shape}" for colour, shape in pairs)
        where = f"position={self.position} size={self.size} relation={relation}"
        return f"{self.kind} {what} count={self.count} {where} background={self.background}"


def wish_of(asked: Scene | str) -> Wish:
    """What a scene, or a caption made by `compose`, asks for."""
    if isinstance(asked, str):
        return _read(asked)
    count = len(asked.items) if asked.kind == "count" else 1
    pairs = tuple(item.pair for item in asked.items)
    return Wish(
        asked.kind,
        pairs[:1] if asked.kind == "count" else pairs,
        asked.background,
        count,
        asked.position,
        asked.size,
        asked.relation,
    )


def is_held_out(asked: Scene | str) -> bool:
    """Whether this must not be trained on: a pair of LEFT_OUT, or one wish in sixteen."""
    wish = wish_of(asked)
    if any(pair in LEFT_OUT for pair in wish.pairs):
        return True
    return hashlib.sha256(wish.describe().encode()).digest()[0] % 16 == 0


def _read(caption: str) -> Wish:
    relation, parts = None, [caption]
    found = re.search(r"(?:to the )?\b(left|right) of\b|\b(above|below|under)\b", caption)
    if found:
        word = found[1] or found[2]
        relation = "below" if word == "under" else word
        parts = [caption[: found.start()], caption[found.end() :]]
    pairs = tuple((_word(part, COLOURS), _word(part, SHAPES)) for part in parts)
    words = caption.replace(",", " ").split()
    background = next((word for word in words if word in BACKGROUNDS), "white")
    count = next((n for n, name in NUMBERS.items() if name in words or str(n) in words), 1)
    size = next((word for word in words if word in ("small", "large")), None)
    position = None
    if not found:
        sides = [word for word in ("top", "bottom", "left", "right") if word in words]
        middle = "centre" if {"centre", "middle"} & set(words) else None
        position = " ".join(sides) or middle
    kind = "relation" if found else "count" if count > 1 else "one"
    return Wish(kind, pairs, background, count, position, size, relation)


def _word(text: str, known: dict[str, RGB] | tuple[str, ...]) -> str:
    for name in known:
        if re.search(rf"\b{name}(e?s)?\b", text):
            return name
    raise ValueError(f"none of {', '.join(known)} in {text!r}")


# --- composing --------------------------------------------------------------------------------


def compose(rng: random.Random, width: int, height: int, *, held_out: bool = False) -> Scene:
    """A scene drawn by chance, one that is held out or one that is not."""
    while True:
        chance = rng.random()
        if chance < 0.45:
            scene = _one(rng, width, height)
        elif chance < 0.7:
            scene = _count(rng, width, height)
        else:
            scene = _relation(rng, width, height)
        if is_held_out(scene) == held_out:
            return scene


def held_out_scenes() -> list[Scene]:
    """The scenes a model is judged by: always the same, each asking for something else.

    Every fourth has a pair of LEFT_OUT.
    """
    scenes: list[Scene] = []
    seen: set[str] = set()
    for index in range(HELD_OUT_SCENES):
        rng = random.Random(f"held out {index}")
        width, height = SIZES[index % len(SIZES)]
        while True:
            scene = compose(rng, width, height, held_out=True)
            description = wish_of(scene).describe()
            if scene.is_left_out == (index % 4 == 0) and description not in seen:
                break
        seen.add(description)
        scenes.append(scene)
    return scenes


def _one(rng: random.Random, width: int, height: int) -> Scene:
    colour, shape = _pair(rng)
    size = rng.choice(("small", "large")) if rng.random() < 0.4 else None
    position = rng.choice(tuple(PLACES)) if rng.random() < 0.45 else None
    if size == "large" and position:
        position = "centre"  # there is no room to stand anywhere else
    low, high = RADII[size]
    radius = _quarter(rng.uniform(low, high) * min(width, height))
    x = _place(rng, width, radius, _side(position, "left", "right"))
    y = _place(rng, height, radius, _side(position, "top", "bottom"))
    background, ground = _ground(rng)
    where = rng.choice(PLACES[position]) if position else ""
    caption = _join(_phrase_one(rng, colour, shape, size), where, ground)
    item = Item(colour, shape, x, y, radius)
    return Scene(
        width,
        height,
        background,
        (item,),
        caption,
        "one",
        position=position,
        size=size,
        background_said=bool(ground),
    )


def _count(rng: random.Random, width: int, height: int) -> Scene:
    colour, shape = _pair(rng)
    count = rng.choice(tuple(NUMBERS))
    side = min(width, height)
    radius = _quarter(rng.uniform(0.13, 0.18) * side)
    items = tuple(
        Item(
            colour,
            shape,
            _quarter(x * width + rng.uniform(-0.025, 0.025) * side),
            _quarter(y * height + rng.uniform(-0.025, 0.025) * side),
            radius,
        )
        for x, y in ARRANGEMENTS[count]
    )
    background, ground = _ground(rng)
    number = NUMBERS[count] if rng.random() < 0.75 else str(count)
    shapes = plural(shape)
    what = rng.choice(
        (
            f"{number} {colour} {shapes}",
            f"{number} {colour} {shapes}",
            f"a picture of {number} {colour} {shapes}",
            f"{number} {shapes} that are {colour}",
        )
    )
    caption = _join(what, ground)
    return Scene(width, height, background, items, caption, "count", background_said=bool(ground))


def _relation(rng: random.Random, width: int, height: int) -> Scene:
    first = _pair(rng)
    second = _pair(rng)
    while second == first:
        second = _pair(rng)
    relation = rng.choice(tuple(RELATIONS))
    side = min(width, height)
    shares = (0.25, 0.75) if relation in ("left", "above") else (0.75, 0.25)
    items = []
    for (colour, shape), share in zip((first, second), shares, strict=True):
        radius = _quarter(rng.uniform(0.15, 0.19) * side)
        along, across = rng.uniform(-0.02, 0.02) * side, rng.uniform(-0.08, 0.08) * side
        if relation in ("left", "right"):
            x, y = share * width + along, 0.5 * height + across
        else:
            x, y = 0.5 * width + across, share * height + along
        items.append(Item(colour, shape, _quarter(x), _quarter(y), radius))
    background, ground = _ground(rng)
    names = [" ".join(first), " ".join(second)]
    what = f"{with_article(names[0])} {rng.choice(RELATIONS[relation])} {with_article(names[1])}"
    if rng.random() < 0.2:
        what = f"a picture of {what}"
    caption = _join(what, ground)
    return Scene(
        width,
        height,
        background,
        tuple(items),
        caption,
        "relation",
        relation=relation,
        background_said=bool(ground),
    )


def _pair(rng: random.Random) -> tuple[str, str]:
    return rng.choice(tuple(COLOURS)), rng.choice(SHAPES)


def _ground(rng: random.Random) -> tuple[str, str]:
    """A background and how it is said, which is not at all in half of the cases."""
    if rng.random() < 0.5:
        return "white", ""
    name = rng.choice(tuple(BACKGROUNDS))
    return name, rng.choice(GROUNDS).format(name)


def _side(position: str | None, low: str, high: str) -> str:
    words = (position or "").split()
    return "low" if low in words else "high" if high in words else "middle"


def _place(rng: random.Random, length: int, radius: float, side: str) -> float:
    """A coordinate that leaves a margin of 2 pixels."""
    if side == "middle":
        return _quarter(length * rng.uniform(0.46, 0.54))
    nearest = max(radius + 2, 0.18 * length)
    place = rng.uniform(nearest, max(nearest, 0.33 * length))
    return _quarter(place if side == "low" else length - place)


def _quarter(value: float) -> float:
    """Rounded to what the drawing can show."""
    return round(value * SCALE) / SCALE


def _phrase_one(rng: random.Random, colour: str, shape: str, size: str | None) -> str:
    sized = f"{size} " if size else ""
    name = f"{sized}{colour} {shape}"
    return rng.choice(
        (
            with_article(name),
            with_article(name),
            f"one {name}",
            f"a picture of {with_article(name)}",
            f"{with_article(sized + shape)} that is {colour}",
            name,
        )
    )


def with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


# --- drawing ----------------------------------------------------------------------------------


@cache
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """The corners of a shape of radius 1 around the origin, y downwards."""
    if shape == "circle":
        turns = [math.tau * step / 64 for step in range(64)]
        return tuple((math.cos(turn), math.sin(turn)) for turn in turns)
    if shape == "square":
        return ((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88))
    if shape == "triangle":
        return ((0.0, -0.95), (1.0, 0.8), (-1.0, 0.8))
    if shape == "star":
        points = []
        for step in range(10):
            reach, turn = (0.45 if step % 2 else 1.0), math.tau * step / 10
            points.append((reach * math.sin(turn), -reach * math.cos(turn)))
        return tuple(points)
    if shape == "cross":
        quarter = ((-0.33, -1.0), (0.33, -1.0), (0.33, -0.33))
        turned = [quarter]
        for _ in range(3):
            turned.append(tuple((-y, x) for x, y in turned[-1]))  # type: ignore[arg-type]
        return tuple(point for part in turned for point in part)
    raise ValueError(f"no such shape: {shape}")


def corners(item: Item) -> list[tuple[float, float]]:
    """The outline of an item on the enlarged drawing, whose pixels have their centres at .5."""
    return [
        ((item.x + item.radius * x) * SCALE - 0.5, (item.y + item.radius * y) * SCALE - 0.5)
        for x, y in outline(item.shape)
    ]


def render(scene: Scene) -> NDArray[np.uint8]:
    """The picture: height, width, 3."""
    size = (scene.width * SCALE, scene.height * SCALE)
    drawing = Image.new("RGB", size, BACKGROUNDS[scene.background])
    pen = ImageDraw.Draw(drawing)
    for item in scene.items:
        pen.polygon(corners(item), fill=COLOURS[item.colour])
    return np.asarray(drawing.reduce(SCALE))


def coverage(item: Item, width: int, height: int) -> NDArray[np.float32]:
    """How much of each pixel an item covers, 0 to 1: height, width."""
    drawing = Image.new("L", (width * SCALE, height * SCALE), 0)
    ImageDraw.Draw(drawing).polygon(corners(item), fill=255)
    return np.asarray(drawing.reduce(SCALE), dtype=np.float32) / np.float32(255)

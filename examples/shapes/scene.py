"""Drawings of shapes with captions: training data for a tiny text-to-image model.

A scene has a caption and items; `render` draws it. composing.py creates random scenes, wishes.py
defines those that are excluded from training.
"""

from __future__ import annotations

import math
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
NINTH: dict[str, RGB] = {"azure": (30, 140, 230)}
"""Unknown to the model: an adapter adds it (train_lora.py)."""

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
SCALE = 4  # oversampling factor of drawings


@dataclass(frozen=True)
class Item:
    """One shape; centre and radius in pixels, y downwards. The radius bounds the shape."""

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
    """The items of a picture, and its caption's statements: None if not stated.

    `kind` is "one", "count" or "relation"; a relation is that of the first item to the second.
    A background that is not stated is white.
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


@cache
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Return the corners of a shape of radius 1 around the origin, y downwards."""
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
    """Return the outline of an item on the oversampled drawing, with pixel centres at .5."""
    return [
        ((item.x + item.radius * x) * SCALE - 0.5, (item.y + item.radius * y) * SCALE - 0.5)
        for x, y in outline(item.shape)
    ]


def render(scene: Scene) -> NDArray[np.uint8]:
    """Return the picture: height, width, 3."""
    size = (scene.width * SCALE, scene.height * SCALE)
    drawing = Image.new("RGB", size, BACKGROUNDS[scene.background])
    pen, colours = ImageDraw.Draw(drawing), {**COLOURS, **NINTH}
    for item in scene.items:
        pen.polygon(corners(item), fill=colours[item.colour])
    return np.asarray(drawing.reduce(SCALE))


def coverage(item: Item, width: int, height: int) -> NDArray[np.float32]:
    """Return the share of each pixel that an item covers, 0 to 1: height, width."""
    drawing = Image.new("L", (width * SCALE, height * SCALE), 0)
    ImageDraw.Draw(drawing).polygon(corners(item), fill=255)
    return np.asarray(drawing.reduce(SCALE), dtype=np.float32) / np.float32(255)

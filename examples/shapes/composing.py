"""Random scenes with captions, for training and for evaluation."""

from __future__ import annotations

import random
from dataclasses import replace

from scene import BACKGROUNDS, COLOURS, NINTH, SCALE, SHAPES, SIZES, Item, Scene
from wishes import NUMBERS, is_held_out, wish_of

HELD_OUT_SCENES = 300
NINTH_SCENES = 100
TWIN = "blue"  # of the ninth colour; no background has this name
RADII = {"small": (0.16, 0.185), None: (0.23, 0.27), "large": (0.34, 0.38)}
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
# positions of the items of a count, as shares of width and height
ARRANGEMENTS = {
    2: ((0.25, 0.5), (0.75, 0.5)),
    3: ((0.5, 0.25), (0.25, 0.75), (0.75, 0.75)),
    4: ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)),
}


def compose(rng: random.Random, width: int, height: int, *, held_out: bool = False) -> Scene:
    """Return a random scene, held out or not."""
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
    """Return the scenes for evaluation: always the same, all with different contents.

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


def twin(rng: random.Random, width: int, height: int, *, held_out: bool = False) -> Scene:
    """Return a random scene with blue shapes, which the ninth colour may replace."""
    while True:
        scene = compose(rng, width, height, held_out=held_out)
        if TWIN in scene.caption:
            return scene


def recoloured(scene: Scene) -> Scene:
    """Return the scene with the ninth colour instead of blue."""
    (ninth,) = NINTH
    items = tuple(
        replace(item, colour=ninth) if item.colour == TWIN else item for item in scene.items
    )
    caption = scene.caption.replace(f"a {TWIN}", with_article(ninth)).replace(TWIN, ninth)
    return replace(scene, items=items, caption=caption)


def ninth_scenes() -> list[Scene]:
    """Return scenes with the ninth colour for evaluation: always the same, with held-out contents.

    Neither they nor their twins are in the training of the model or of the adapter.
    """
    scenes: dict[str, Scene] = {}
    for index in range(NINTH_SCENES):
        rng = random.Random(f"ninth {index}")
        size = SIZES[index % len(SIZES)]
        scene = recoloured(twin(rng, *size, held_out=True))
        while wish_of(scene).describe() in scenes:
            scene = recoloured(twin(rng, *size, held_out=True))
        scenes[wish_of(scene).describe()] = scene
    return list(scenes.values())


def _one(rng: random.Random, width: int, height: int) -> Scene:
    colour, shape = _pair(rng)
    size = rng.choice(("small", "large")) if rng.random() < 0.4 else None
    position = rng.choice(tuple(PLACES)) if rng.random() < 0.45 else None
    if size == "large" and position:
        position = "centre"  # there is no room elsewhere
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
    radius = _quarter(rng.uniform(0.155, 0.19) * side)
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
        radius = _quarter(rng.uniform(0.175, 0.2) * side)
        along, across = rng.uniform(-0.015, 0.015) * side, rng.uniform(-0.08, 0.08) * side
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
    """Return a background and its wording, which is empty in half of the cases."""
    if rng.random() < 0.5:
        return "white", ""
    name = rng.choice(tuple(BACKGROUNDS))
    return name, rng.choice(GROUNDS).format(name)


def _side(position: str | None, low: str, high: str) -> str:
    words = (position or "").split()
    return "low" if low in words else "high" if high in words else "middle"


def _place(rng: random.Random, length: int, radius: float, side: str) -> float:
    """Return a coordinate with a margin of 2 pixels."""
    if side == "middle":
        return _quarter(length * rng.uniform(0.46, 0.54))
    nearest = max(radius + 2, 0.18 * length)
    place = rng.uniform(nearest, max(nearest, 0.33 * length))
    return _quarter(place if side == "low" else length - place)


def _quarter(value: float) -> float:
    """Round to the resolution of the drawing."""
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

"""The judge: right about true pictures, and about wrong ones."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from composing import RELATIONS, compose
from judge import Seen, SeenItem, look
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from scene import COLOURS, SHAPES, SIZES, Item, Scene, render
from score import FIGURES, Verdict, figures, score

Picture = NDArray[np.uint8]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = random.Random(3)
    return [compose(rng, *SIZES[n % len(SIZES)], held_out=n % 3 == 0) for n in range(150)]


@pytest.fixture(scope="module")
def seen(scenes: list[Scene]) -> list[Seen]:
    """Return the judge's findings on the true pictures."""
    return [look(render(scene)) for scene in scenes]


def spoiled(picture: Picture, rng: np.random.Generator, off: float = 0) -> Picture:
    """Blurred, noisy, and of a colour that is somewhat off."""
    soft = Image.fromarray(picture).filter(ImageFilter.GaussianBlur(1))
    noisy = np.asarray(soft) + rng.normal(0, 8, picture.shape) + rng.uniform(-off, off, 3)
    return noisy.clip(0, 255).round().astype(np.uint8)


def judged(scenes: list[Scene], seen: list[Seen]) -> dict[str, float]:
    pairs = zip(scenes, seen, strict=True)
    found = figures((scene, score(scene, one)) for scene, one in pairs)
    assert tuple(found) == FIGURES
    assert all((figure["of"] or 0) >= 5 for figure in found.values())
    return {name: figure["share"] or 0.0 for name, figure in found.items()}


@pytest.mark.integration
def test_true_pictures_are_right(scenes: list[Scene], seen: list[Seen]) -> None:
    found = judged(scenes, seen)
    assert min(found.values()) >= 0.99, found


@pytest.mark.integration
@pytest.mark.parametrize("off", [0, 25])
def test_blurred_and_noisy_pictures_are_right(scenes: list[Scene], off: float) -> None:
    rng = np.random.default_rng(4)
    found = judged(scenes, [look(spoiled(render(scene), rng, off)) for scene in scenes])
    assert min(found.values()) >= 0.97, found


def test_specks_are_not_items(scenes: list[Scene]) -> None:
    rng = random.Random(5)
    for scene in scenes[:30]:
        picture = render(scene).copy()
        for _ in range(6):
            x, y = rng.randrange(2, scene.width - 4), rng.randrange(2, scene.height - 4)
            picture[y : y + 2, x : x + 2] = rng.choice(tuple(COLOURS.values()))
        assert len(look(picture).items) == len(scene.items)


def test_places_and_radii_are_measured(scenes: list[Scene], seen: list[Seen]) -> None:
    for scene, one in zip(scenes, seen, strict=True):
        for item in scene.items:
            near = min(one.items, key=lambda it: abs(it.x - item.x) + abs(it.y - item.y))
            assert abs(near.x - item.x) < 1
            assert abs(near.y - item.y) < 1
            assert near.radius == pytest.approx(item.radius, rel=0.05)


# --- what is wrong is told so -----------------------------------------------------------------


def caught(verdicts: list[bool | None]) -> float:
    assert len(verdicts) >= 15
    return verdicts.count(False) / len(verdicts)


def other(name: str, names: tuple[str, ...], rng: random.Random) -> str:
    return rng.choice([each for each in names if each != name])


@pytest.mark.integration
def test_another_colour_is_wrong(scenes: list[Scene]) -> None:
    rng = random.Random(6)
    verdicts = []
    for scene in scenes:
        first = scene.items[0]
        changed = replace(first, colour=other(first.colour, tuple(COLOURS), rng))
        picture = render(replace(scene, items=(changed, *scene.items[1:])))
        verdict = score(scene, look(picture))
        assert verdict.shape
        verdicts.append(verdict.colour or verdict.both)
    assert caught(list(verdicts)) >= 0.99


@pytest.mark.integration
def test_another_shape_is_wrong(scenes: list[Scene]) -> None:
    rng = random.Random(7)
    verdicts = []
    for scene in scenes:
        first = scene.items[0]
        changed = replace(first, shape=other(first.shape, SHAPES, rng))
        picture = render(replace(scene, items=(changed, *scene.items[1:])))
        verdict = score(scene, look(picture))
        assert verdict.colour
        verdicts.append(verdict.shape or verdict.both)
    assert caught(list(verdicts)) >= 0.99


def test_a_missing_item_is_wrong(scenes: list[Scene]) -> None:
    verdicts: list[bool | None] = []
    for scene in scenes:
        verdict = score(scene, look(render(replace(scene, items=scene.items[1:]))))
        verdicts.append(verdict.count if scene.kind == "count" else verdict.both)
        assert not verdict.relation
        if scene.kind == "one":
            assert not (verdict.position or verdict.size)
    assert caught(verdicts) >= 0.99


def test_one_item_too_many_is_wrong(scenes: list[Scene]) -> None:
    counts = [scene for scene in scenes if scene.kind == "count" and len(scene.items) < 4]
    verdicts: list[bool | None] = []
    for scene in counts:
        fewer = replace(scene, items=scene.items[:-1])
        verdicts.append(score(fewer, look(render(scene))).count)
    assert caught(verdicts) >= 0.99


def test_items_that_changed_places_are_wrong(scenes: list[Scene]) -> None:
    verdicts: list[bool | None] = []
    for scene in scenes:
        if scene.relation:
            one, two = scene.items
            swapped = (replace(one, x=two.x, y=two.y), replace(two, x=one.x, y=one.y))
            verdict = score(scene, look(render(replace(scene, items=swapped))))
            assert verdict.both
            verdicts.append(verdict.relation)
    assert caught(verdicts) >= 0.99


def test_another_relation_is_wrong(scenes: list[Scene], seen: list[Seen]) -> None:
    verdicts = [
        score(replace(scene, relation=relation), one).relation
        for scene, one in zip(scenes, seen, strict=True)
        for relation in RELATIONS
        if scene.relation and relation != scene.relation
    ]
    assert caught(verdicts) >= 0.99


def test_another_place_size_or_background_is_wrong(scenes: list[Scene], seen: list[Seen]) -> None:
    verdicts: list[bool | None] = []
    for scene, one in zip(scenes, seen, strict=True):
        if scene.position:
            place = "top left" if scene.position != "top left" else "left"
            verdicts.append(score(replace(scene, position=place), one).position)
        if scene.size:
            size = "small" if scene.size == "large" else "large"
            verdicts.append(score(replace(scene, size=size), one).size)
        if scene.background_said:
            ground = "black" if scene.background != "black" else "brown"
            verdicts.append(score(replace(scene, background=ground), one).background)
    assert caught(verdicts) >= 0.99


def test_a_plain_shape_is_neither_small_nor_large(scenes: list[Scene], seen: list[Seen]) -> None:
    verdicts = [
        score(replace(scene, size=size), one).size
        for scene, one in zip(scenes, seen, strict=True)
        for size in ("small", "large")
        if scene.kind == "one" and scene.size is None
    ]
    assert caught(verdicts) >= 0.99


# --- odd pictures -----------------------------------------------------------------------------


def scene_of(*items: Item, position: str | None = None, relation: str | None = None) -> Scene:
    kind = "relation" if relation else "one"
    return Scene(64, 64, "white", items, "", kind, position=position, relation=relation)


def test_an_empty_picture() -> None:
    seen = look(np.full((64, 96, 3), 128, dtype=np.uint8))
    assert seen == Seen("grey", (), 96, 64)
    for scene in (compose(random.Random(seed), 96, 64) for seed in range(20)):
        verdict = score(scene, seen)
        assert not (verdict.colour or verdict.shape or verdict.both or verdict.relation)
        assert not (verdict.count or verdict.position or verdict.size)


def test_noise_is_not_a_shape() -> None:
    noise = np.random.default_rng(8).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    scene = scene_of(Item("red", "circle", 32, 32, 15))
    assert not score(scene, look(noise)).both


def test_shapes_of_two_colours_that_touch_are_two() -> None:
    scene = scene_of(Item("red", "square", 21, 32, 12), Item("blue", "square", 42, 32, 12))
    found = {(item.colour, item.shape) for item in look(render(scene)).items}
    assert found == {("red", "square"), ("blue", "square")}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_the_border_cuts(shape: str) -> None:
    for x, y in ((11, 32), (53, 32), (32, 11), (32, 53)):
        seen = look(render(scene_of(Item("green", shape, x, y, 14))))
        assert [(item.colour, item.shape) for item in seen.items] == [("green", shape)]


def test_a_grey_shape_has_none_of_the_colours() -> None:
    picture = np.full((64, 64, 3), 255, dtype=np.uint8)
    picture[20:44, 20:44] = 120
    (item,) = look(picture).items
    assert (item.colour, item.shape) == ("grey", "square")


def test_an_odd_shape_is_none() -> None:
    picture = np.full((64, 64, 3), 255, dtype=np.uint8)
    picture[30:34, 8:56] = COLOURS["red"]
    (item,) = look(picture).items
    assert (item.colour, item.shape) == ("red", "none")


# --- scoring ----------------------------------------------------------------------------------


def seen_of(*items: tuple[str, str, float, float]) -> Seen:
    found = tuple(SeenItem(colour, shape, x, y, 10) for colour, shape, x, y in items)
    return Seen("white", found, 64, 64)


ASKED = scene_of(
    Item("red", "circle", 16, 32, 10), Item("blue", "square", 48, 32, 10), relation="left"
)


def test_colours_on_the_wrong_shapes() -> None:
    seen = seen_of(("blue", "circle", 16, 32), ("red", "square", 48, 32))
    verdict = score(ASKED, seen)
    assert (verdict.colour, verdict.shape, verdict.both) == (True, True, False)
    assert not verdict.relation  # the colour tells which is which, before the shape


@pytest.mark.parametrize(
    ("items", "right"),
    [
        ([("red", "star", 16, 32), ("blue", "star", 48, 32)], True),
        ([("red", "star", 48, 32), ("blue", "star", 16, 32)], False),
        ([("green", "circle", 16, 32), ("green", "square", 48, 32)], True),
        ([("green", "circle", 48, 32), ("green", "square", 16, 32)], False),
        ([("red", "circle", 16, 16), ("blue", "square", 20, 48)], False),
        ([("red", "circle", 8, 32), ("red", "circle", 56, 32), ("blue", "square", 32, 32)], False),
        ([("green", "star", 16, 32), ("blue", "square", 48, 32)], False),
        ([("red", "circle", 16, 32)], False),
    ],
)
def test_which_item_is_which(items: list[tuple[str, str, float, float]], right: bool) -> None:
    assert score(ASKED, seen_of(*items)).relation is right


def test_what_is_not_asked_is_not_judged() -> None:
    scene = scene_of(Item("red", "circle", 32, 32, 10))
    verdict = score(scene, seen_of(("red", "circle", 32, 32)))
    assert verdict == Verdict(True, True, True, None, None, None, None, None)


def test_figures_count_each_on_its_own() -> None:
    trained = scene_of(Item("red", "circle", 32, 32, 10), position="left")
    left_out = scene_of(Item("pink", "circle", 32, 32, 10))
    found = figures(
        [
            (trained, Verdict(True, False, False, None, None, True, None, None)),
            (left_out, Verdict(True, True, True, None, None, None, None, None)),
            (ASKED, Verdict(True, True, True, None, False, None, None, None)),
        ]
    )
    assert found["colour"] == {"right": 3, "of": 3, "share": 1.0}
    assert found["both_trained"] == {"right": 1, "of": 2, "share": 0.5}
    assert found["both_left_out"] == {"right": 1, "of": 1, "share": 1.0}
    assert found["left_right"] == {"right": 0, "of": 1, "share": 0.0}
    assert found["above_below"] == {"right": 0, "of": 0, "share": None}
    assert found["position"] == {"right": 1, "of": 1, "share": 1.0}

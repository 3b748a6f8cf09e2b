"""Scenes: what is held out, where shapes stand, what captions say."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from composing import PLACES, RELATIONS, compose, held_out_scenes, with_article
from scene import BACKGROUNDS, COLOURS, LEFT_OUT, SHAPES, SIZES, Item, Scene, coverage, render
from wishes import NUMBERS, is_held_out, wish_of


@pytest.fixture(scope="module")
def trained() -> list[Scene]:
    rng = random.Random(1)
    return [compose(rng, *rng.choice(SIZES)) for _ in range(5000)]


@pytest.fixture(scope="module")
def held_out() -> list[Scene]:
    return held_out_scenes()


def test_no_training_scene_is_held_out(trained: list[Scene]) -> None:
    for scene in trained:
        assert not is_held_out(scene)
        assert not is_held_out(scene.caption)
        assert not any(item.pair in LEFT_OUT for item in scene.items)


def test_no_training_scene_asks_for_what_the_held_out_ones_ask(
    trained: list[Scene], held_out: list[Scene]
) -> None:
    wishes = {wish_of(scene).describe() for scene in trained}
    assert not wishes & {wish_of(scene).describe() for scene in held_out}


def test_the_held_out_scenes(held_out: list[Scene]) -> None:
    assert len(held_out) == 300
    assert all(is_held_out(scene) and is_held_out(scene.caption) for scene in held_out)
    assert len({wish_of(scene).describe() for scene in held_out}) == 300
    assert 60 <= sum(scene.is_left_out for scene in held_out) <= 90
    pairs = {item.pair for scene in held_out for item in scene.items}
    assert pairs.issuperset(LEFT_OUT)
    kinds = Counter(scene.kind for scene in held_out)
    assert min(kinds[kind] for kind in ("one", "count", "relation")) >= 40
    sizes = Counter((scene.width, scene.height) for scene in held_out)
    assert set(sizes) == set(SIZES)
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_held_out_scenes_are_always_the_same(held_out: list[Scene]) -> None:
    assert held_out_scenes() == held_out


def test_about_one_wish_in_sixteen_is_held_out() -> None:
    singles = [
        Scene(64, 64, ground, (Item(colour, shape, 32, 32, 15),), "", "one", place, size)
        for ground in BACKGROUNDS
        for colour in COLOURS
        for shape in SHAPES
        for place in PLACES
        for size in ("small", None)
        if (colour, shape) not in LEFT_OUT
    ]
    assert sum(map(is_held_out, singles)) / len(singles) == pytest.approx(1 / 16, abs=0.015)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a red circle", "red circle on a white background"),
        ("a red circle on black", "a picture of a red circle against a black background"),
        ("2 blue crosses", "two crosses that are blue"),
        ("a small red star at the top left", "one small red star in the top left corner"),
        ("a red star left of a green circle", "a green circle to the right of a red star"),
        ("a red star above a green circle", "a green circle under a red star"),
    ],
)
def test_the_wording_does_not_change_the_wish(one: str, other: str) -> None:
    assert wish_of(one).describe() == wish_of(other).describe()


@pytest.mark.parametrize(
    "other",
    [
        "two red circles",
        "a red star",
        "a blue circle",
        "a small red circle",
        "a red circle on the left",
        "a red circle on grey",
        "a red circle left of a red star",
    ],
)
def test_another_wish(other: str) -> None:
    assert wish_of("a red circle").describe() != wish_of(other).describe()


def test_the_same_seed_makes_the_same_scene() -> None:
    for seed in range(50):
        scene = compose(random.Random(seed), 96, 64)
        again = compose(random.Random(seed), 96, 64)
        assert scene == again
        assert np.array_equal(render(scene), render(again))


def test_kinds_come_in_their_shares(trained: list[Scene]) -> None:
    kinds = Counter(scene.kind for scene in trained)
    assert kinds["one"] / len(trained) == pytest.approx(0.48, abs=0.05)
    assert kinds["count"] / len(trained) == pytest.approx(0.26, abs=0.05)
    assert kinds["relation"] / len(trained) == pytest.approx(0.26, abs=0.05)


def test_everything_that_can_be_said_is_said(trained: list[Scene]) -> None:
    assert {scene.position for scene in trained} == {None, *PLACES}
    assert {scene.relation for scene in trained} == {None, *RELATIONS}
    assert {scene.size for scene in trained} == {None, "small", "large"}
    assert {scene.background for scene in trained} == set(BACKGROUNDS)
    counts = {len(scene.items) for scene in trained if scene.kind == "count"}
    assert counts == set(NUMBERS)
    pairs = {item.pair for scene in trained for item in scene.items}
    assert len(pairs) == len(COLOURS) * len(SHAPES) - len(LEFT_OUT)


def test_items_stay_inside_and_apart(trained: list[Scene], held_out: list[Scene]) -> None:
    for scene in trained + held_out:
        for item in scene.items:
            assert item.radius + 1 <= item.x <= scene.width - item.radius - 1
            assert item.radius + 1 <= item.y <= scene.height - item.radius - 1
        least = 4 * min(scene.width, scene.height) / 64
        for one, other in combinations(scene.items, 2):
            away = max(abs(one.x - other.x), abs(one.y - other.y))
            assert away - one.radius - other.radius >= least


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_does_not_reach_past_its_radius(shape: str) -> None:
    drawn = coverage(Item("red", shape, 32, 32, 20), 64, 64)
    rows, columns = np.flatnonzero(drawn.any(axis=1)), np.flatnonzero(drawn.any(axis=0))
    assert min(rows[0], columns[0]) >= 11
    assert max(rows[-1], columns[-1]) <= 52
    assert drawn.max() == 1


def test_items_stand_as_the_caption_says(trained: list[Scene]) -> None:
    for scene in trained:
        if scene.relation:
            one, two = scene.items
            across, down = two.x - one.x, two.y - one.y
            away = {"left": across, "right": -across, "above": down, "below": -down}
            assert away[scene.relation] > one.radius + two.radius
            assert one.pair != two.pair


def test_captions_say_what_is_there(trained: list[Scene], held_out: list[Scene]) -> None:
    for scene in trained + held_out:
        assert wish_of(scene.caption) == wish_of(scene), scene.caption
        assert scene.background_said == any(word in BACKGROUNDS for word in scene.caption.split())


def test_captions_are_english(trained: list[Scene], held_out: list[Scene]) -> None:
    captions = {scene.caption for scene in trained + held_out}
    for caption in captions:
        assert re.fullmatch("[a-z0-9]+( [a-z0-9]+)*", caption), caption
        assert len(caption.split()) <= 22
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|crosss|\bcrosse\b", caption), caption
        many = re.search(r"\b(two|three|four|2|3|4)\b", caption)
        plurals = re.search(r"\b(circles|squares|triangles|stars|crosses)\b", caption)
        assert bool(many) == bool(plurals), caption
    for part in ("an orange", "crosses", "to the left of", "under", "that are", "on black"):
        assert any(part in caption for caption in captions), part


def test_articles() -> None:
    assert with_article("orange star") == "an orange star"
    assert with_article("small orange star") == "a small orange star"


def test_a_picture_has_the_colours_of_its_scene() -> None:
    scene = Scene(96, 64, "grey", (Item("red", "square", 30, 32, 12),), "", "one")
    picture = render(scene)
    assert picture.shape == (64, 96, 3)
    assert picture.dtype == np.uint8
    assert tuple(picture[32, 30]) == COLOURS["red"]
    assert tuple(picture[0, 0]) == BACKGROUNDS["grey"]
    assert tuple(picture[32, 80]) == BACKGROUNDS["grey"]

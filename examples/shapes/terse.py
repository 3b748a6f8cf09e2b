"""Terse wishes for scenes, such as "2 blue boxes, black bg", and the captions that they mean.

The language is closed: the synonyms, orders and abbreviations below, in any case, with typing
errors. wishes.py says which contents are excluded from training.
"""

from __future__ import annotations

import random
import string
from dataclasses import replace

from composing import GROUNDS, PLACES, RELATIONS, compose, held_out_scenes, plural, with_article
from scene import Scene
from wishes import NUMBERS

COLOUR_WORDS = {
    "red": ("red", "crimson", "scarlet"),
    "orange": ("orange", "tangerine", "amber"),
    "yellow": ("yellow", "lemon", "golden"),
    "green": ("green", "emerald", "lime"),
    "cyan": ("cyan", "turquoise", "aqua", "teal"),
    "blue": ("blue", "navy", "cobalt"),
    "purple": ("purple", "violet", "lilac"),
    "pink": ("pink", "rose", "salmon"),
}
SHAPE_WORDS = {
    "circle": ("circle", "ball", "disc", "dot"),
    "square": ("square", "box", "block"),
    "triangle": ("triangle", "pyramid", "wedge"),
    "star": ("star", "starlet"),
    "cross": ("cross", "plus", "plus sign"),
}
GROUND_WORDS = {
    "white": ("white", "snow"),
    "grey": ("grey", "gray"),
    "black": ("black", "dark"),
    "brown": ("brown", "chocolate"),
}
NUMBER_WORDS = {
    2: ("2", "two", "pair of", "couple of", "2x"),
    3: ("3", "three", "trio of", "3x"),
    4: ("4", "four", "quartet of", "4x"),
}
SIZE_WORDS = {"small": ("small", "little", "tiny", "mini"), "large": ("large", "big", "huge")}
SIDE_WORDS = {
    "top": ("top", "upper", "up"),
    "bottom": ("bottom", "lower", "down"),
    "left": ("left", "lefthand"),
    "right": ("right", "righthand"),
    "centre": ("centre", "center", "middle", "mid"),
}
RELATION_WORDS = {
    "left": ("left of", "to the left of", "left from"),
    "right": ("right of", "to the right of", "right from"),
    "above": ("above", "over", "on top of", "atop"),
    "below": ("below", "under", "beneath", "underneath"),
}
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}
ANYTHING = ("invent a picture", "surprise me", "anything", "something random", "whatever")
BEGINNINGS = (*[""] * 9, "draw ", "show me ", "picture of ", "i want ")
TYPO = 0.07  # of a word of four letters or more
TERSE_SCENES = 100


def terse(rng: random.Random, scene: Scene) -> str:
    """Return a terse wish for a scene."""
    what, where = _words_of(rng, scene), _place(rng, scene)
    ground = _ground(rng, scene)
    parts = [what, *filter(None, (where, ground))]
    if rng.random() < 0.25:
        rng.shuffle(parts)
    text = rng.choice(BEGINNINGS) + rng.choice((", ", " ", ", ", " - ")).join(parts)
    text = _mistype(rng, text)
    chance = rng.random()
    text = text.upper() if chance < 0.05 else text.capitalize() if chance < 0.15 else text
    return text + rng.choice(("", "", "", ".", "!", " please"))


def caption(rng: random.Random, scene: Scene) -> str:
    """Return a caption of a scene in words that the shapes model knows."""
    first = scene.items[0]
    sized = f"{scene.size} " if scene.size else ""
    if scene.kind == "count":
        what = f"{NUMBERS[len(scene.items)]} {first.colour} {plural(first.shape)}"
    else:
        what = with_article(f"{sized}{first.colour} {first.shape}")
    if scene.relation:
        second = scene.items[1]
        relation = RELATIONS[scene.relation][0]
        what += f" {relation} {with_article(f'{second.colour} {second.shape}')}"
    where = rng.choice(PLACES[scene.position]) if scene.position else ""
    ground = rng.choice(GROUNDS[::2]).format(scene.background) if scene.background_said else ""
    return " ".join(filter(None, (what, where, ground)))


def pair(rng: random.Random) -> tuple[str, str]:
    """Return a random wish and its caption for training; no content that is held out."""
    scene = _turned(rng, compose(rng, 64, 64))
    said = caption(rng, scene)
    if rng.random() < 0.03:
        return rng.choice(ANYTHING), said
    if scene.kind == "count" and rng.random() < 0.1:  # a place that no caption can state
        scene = replace(scene, position=rng.choice(tuple(PLACES)))
    return terse(rng, scene), said


def terse_scenes() -> list[tuple[str, Scene]]:
    """Return wishes and scenes for evaluation: always the same, all with held-out contents."""
    scenes = held_out_scenes()[:TERSE_SCENES]
    return [
        (terse(random.Random(f"terse {index}"), scene), scene) for index, scene in enumerate(scenes)
    ]


def _turned(rng: random.Random, scene: Scene) -> Scene:
    """Return a scene, sometimes with "b right of a" in place of "a left of b"."""
    if not scene.relation or rng.random() < 0.6:
        return scene
    return replace(scene, items=scene.items[::-1], relation=OPPOSITE[scene.relation])


def corpus(count: int) -> list[str]:
    """Return wishes and captions from which a tokenizer learns the words of the language."""
    rng = random.Random("words")
    return [text for _ in range(count) for text in pair(rng)]


def _words_of(rng: random.Random, scene: Scene) -> str:
    things = [_thing(rng, scene, index) for index in range(1 + bool(scene.relation))]
    if not scene.relation:
        return things[0]
    relation, chance = scene.relation, rng.random()
    if chance < 0.7:
        return f"{things[0]} {rng.choice(RELATION_WORDS[relation])} {things[1]}"
    side, other = relation, OPPOSITE[relation]
    if chance < 0.85:
        sides = {"above": "top", "below": "bottom"}
        return f"{things[0]} {sides.get(side, side)}, {things[1]} {sides.get(other, other)}"
    words = other if other in ("above", "below") else f"to the {other} of"
    return f"{things[0]}, {words} it {things[1]}"


def _thing(rng: random.Random, scene: Scene, index: int) -> str:
    item = scene.items[index]
    colour, shape = rng.choice(COLOUR_WORDS[item.colour]), rng.choice(SHAPE_WORDS[item.shape])
    if rng.random() < 0.4:
        colour, shape = item.colour, SHAPE_WORDS[item.shape][0]
    number = ""
    if scene.kind == "count":
        number, shape = rng.choice(NUMBER_WORDS[len(scene.items)]), _plural(shape)
    size = rng.choice(SIZE_WORDS[scene.size]) if scene.size else ""
    article = rng.choice(("", "", "", "a")) if scene.kind != "count" else ""
    words = [article, number, size, colour, shape]
    if rng.random() < 0.1:
        words = [article, number, size, shape, colour]
    return " ".join(filter(None, words))


def _plural(shape: str) -> str:
    return f"{shape}es" if shape[-1] in "sx" else f"{shape}s"


def _place(rng: random.Random, scene: Scene) -> str:
    if not scene.position:
        return ""
    words = [rng.choice(SIDE_WORDS[side]) for side in scene.position.split()]
    joined = rng.choice((" ", " ", "-")).join(words)
    before = rng.choice(("", "", "", "at ", "in the ", "on the "))
    return before + joined + (rng.choice(("", " corner")) if len(words) == 2 else "")


def _ground(rng: random.Random, scene: Scene) -> str:
    if not scene.background_said:
        return ""
    name = rng.choice(GROUND_WORDS[scene.background])
    forms = ("on {}", "{} bg", "{} background", "bg {}", "{} backdrop", "with {} behind")
    return rng.choice(forms).format(name)


def _mistype(rng: random.Random, text: str) -> str:
    return " ".join(
        _misspell(rng, word) if len(word) > 3 and rng.random() < TYPO else word
        for word in text.split(" ")
    )


def _misspell(rng: random.Random, word: str) -> str:
    """Return a word with a letter left out, doubled, exchanged with the next, or replaced."""
    at = rng.randrange(1, len(word) - 1)
    return rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[: at + 1] + word[at:],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + rng.choice(string.ascii_lowercase) + word[at + 1 :],
        )
    )

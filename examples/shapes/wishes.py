"""Contents that captions describe, and the split of held-out scenes.

Some contents are in no training scene, so that a model cannot have memorized them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from scene import BACKGROUNDS, COLOURS, LEFT_OUT, RGB, SHAPES, Scene

NUMBERS = {2: "two", 3: "three", 4: "four"}


@dataclass(frozen=True)
class Wish:
    """The content of a caption, however it is worded."""

    kind: str
    pairs: tuple[tuple[str, str], ...]
    background: str
    count: int = 1
    position: str | None = None
    size: str | None = None
    relation: str | None = None

    def describe(self) -> str:
        """Return a canonical form: "a right of b" is "b left of a", "a below b" is "b above a"."""
        pairs, relation = self.pairs, self.relation
        if relation in ("right", "below"):
            pairs, relation = pairs[::-1], "left" if relation == "right" else "above"
        what = " ".join(f"{colour}-{shape}" for colour, shape in pairs)
        where = f"position={self.position} size={self.size} relation={relation}"
        return f"{self.kind} {what} count={self.count} {where} background={self.background}"


def wish_of(asked: Scene | str) -> Wish:
    """Return the content of a scene, or of a caption made by `compose`."""
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
    """Return whether it is excluded from training: a pair of LEFT_OUT, or one content in 16."""
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

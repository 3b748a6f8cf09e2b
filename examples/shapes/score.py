"""Scores of pictures: how often the judge saw what the caption describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

from judge import Seen, SeenItem
from scene import Item, Scene

SMALL, LARGE = 0.205, 0.305  # radii, as shares of the shorter side
LOW, HIGH = 0.42, 0.58  # limits of left and top, and of right and bottom


@dataclass(frozen=True)
class Verdict:
    """The correct properties; None where the caption specifies nothing.

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


def score(scene: Scene, seen: Seen) -> Verdict:
    """Compare the items seen in the picture with those that the caption describes."""
    asked = [item.pair for item in scene.items]
    found = [(item.colour, item.shape) for item in seen.items]
    if scene.kind == "count" and found:
        asked = asked[:1] * len(found)  # the number is scored separately
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
    """Return 3 for the same colour and shape, 2 for the colour only, 1 for the shape only."""
    return 2 * (asked.colour == found.colour) + (asked.shape == found.shape)


def _related(scene: Scene, seen: Seen) -> bool:
    """Return whether the two items are related as asked, in each of the best assignments."""
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
    """Return the item that a caption of one shape refers to: the most similar, else the largest."""
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
    """Return for each figure the correct and total numbers, and their ratio (None if empty)."""
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

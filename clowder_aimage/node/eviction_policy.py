"""Which names a node lets go because nobody wants them any more. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from clowder_aimage.oci import Digest

# Why a name stays; the first that holds
WANTED, NEVER_OURS, PINNED, IN_USE, NOT_TOLD = (
    "wanted",
    "never wanted here",
    "pinned",
    "in use",
    "the node may not prune",
)


@dataclass(frozen=True, slots=True)
class EvictionFacts:
    """``here``: the names in the store and what they mean; ``ever``: names that this node, and no
    other, was told to keep at any time; ``wanted``: now; ``pinned``: by anyone but the node;
    ``held``: digests that running processes need."""

    here: Mapping[str, Digest]
    ever: Collection[str]
    wanted: Collection[str]
    pinned: Collection[str]
    held: Collection[Digest]


def stays(name: str, facts: EvictionFacts, *, may_prune: bool) -> str | None:
    """Why ``name`` stays; None where it goes."""
    if name in facts.wanted:
        return WANTED
    if name not in facts.ever:
        return NEVER_OURS
    if not may_prune:
        return NOT_TOLD
    if name in facts.pinned:
        return PINNED
    if facts.here.get(name) in facts.held:
        return IN_USE
    return None


def unwanted(facts: EvictionFacts, *, may_prune: bool) -> list[str]:
    """The names that go."""
    return [name for name in sorted(facts.here) if stays(name, facts, may_prune=may_prune) is None]

"""Which names go: the table of cases."""

from __future__ import annotations

import itertools

import pytest

from clowder_aimage.node.eviction_policy import (
    IN_USE,
    NEVER_OURS,
    NOT_TOLD,
    PINNED,
    WANTED,
    EvictionFacts,
    stays,
    unwanted,
)
from clowder_aimage.oci import Digest

NAME = "registry.example.com/team/model:v1"
DIGEST = Digest.of(b"model")
CASES = [
    # wanted, ever wanted, pinned, in use, --prune: why it stays; None where it goes
    (True, True, False, False, True, WANTED),
    (True, True, False, False, False, WANTED),
    (False, True, False, False, True, None),
    (False, True, False, False, False, NOT_TOLD),
    (False, True, True, False, True, PINNED),
    (False, True, False, True, True, IN_USE),
    (False, True, True, True, True, PINNED),
    (False, False, False, False, True, NEVER_OURS),  # what people pulled themselves
    (False, False, False, False, False, NEVER_OURS),
    (False, False, True, True, True, NEVER_OURS),
]


def facts(*, wanted: bool, ever: bool, pinned: bool, held: bool) -> EvictionFacts:
    def names(holds: bool) -> set[str]:
        return {NAME} if holds else set()

    return EvictionFacts(
        {NAME: DIGEST}, names(ever), names(wanted), names(pinned), {DIGEST} if held else ()
    )


@pytest.mark.parametrize(("wanted", "ever", "pinned", "held", "may_prune", "reason"), CASES)
def test_why_a_name_stays(wanted, ever, pinned, held, may_prune, reason):
    known = facts(wanted=wanted, ever=ever, pinned=pinned, held=held)
    assert stays(NAME, known, may_prune=may_prune) == reason
    assert unwanted(known, may_prune=may_prune) == ([] if reason else [NAME])


def test_only_what_was_wanted_once_and_is_free_goes_and_only_with_prune():
    for wanted, ever, pinned, held, may_prune in itertools.product((True, False), repeat=5):
        known = facts(wanted=wanted, ever=ever, pinned=pinned, held=held)
        goes = stays(NAME, known, may_prune=may_prune) is None
        assert goes == (may_prune and ever and not (wanted or pinned or held))

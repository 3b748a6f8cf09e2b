"""The names that are pruned."""

from __future__ import annotations

import pytest

from clowder_aimage.node.eviction import EvictionFacts, unwanted
from clowder_aimage.oci import Digest

NAME, DIGEST = "registry.example.com/team/model:v1", Digest.of(b"model")


@pytest.mark.parametrize(
    ("change", "goes"),
    [
        ({}, True),
        ({"wanted": {NAME}}, False),
        ({"ever": ()}, False),  # what people pulled themselves
        ({"pinned": {NAME}}, False),
        ({"held": {DIGEST}}, False),
        ({"here": {}}, False),
    ],
)
def test_a_name_is_pruned_if_it_was_listed_once_and_nothing_needs_it(change, goes):
    facts = {"here": {NAME: DIGEST}, "ever": {NAME}, "wanted": (), "pinned": (), "held": ()}
    assert unwanted(EvictionFacts(**(facts | change))) == ([NAME] if goes else [])

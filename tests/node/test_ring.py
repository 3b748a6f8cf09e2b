"""Who is at home to which range."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError
from clowder_aimage.node.rendezvous import RANGE, BlobRange, ranked
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.oci.descriptor import MAX_SIZE

DIGEST = Digest.of(b"a blob")
IDS = [f"{number:032x}" for number in range(16)]


@given(st.integers(1, MAX_SIZE), st.data())
def test_ranges_cover_a_blob_without_gap_or_overlap(size, data):
    number = data.draw(st.integers(0, (size - 1) // RANGE))
    part = BlobRange(DIGEST, size, number)
    assert 0 < part.length <= RANGE
    assert part.start == number * RANGE
    if part.end < size:
        assert BlobRange(DIGEST, size, number + 1).start == part.end
    assert part.is_whole == (size <= RANGE)
    for at in (part.start, part.end - 1):
        assert BlobRange.at(Descriptor("", DIGEST, size), at) == part


@pytest.mark.parametrize(
    ("size", "number"),
    [(0, 0), (-1, 0), (MAX_SIZE + 1, 0), (5, 1), (5, -1), (RANGE, 1), (RANGE + 1, 2), (9, 1 << 60)],
)
def test_a_range_that_no_blob_has_is_refused(size, number):
    with pytest.raises(FormatError):
        BlobRange(DIGEST, size, number)


def test_all_nodes_name_the_same_home_whatever_order_they_know_the_others_in():
    part = BlobRange(DIGEST, 10 * RANGE, 3)
    assert ranked(IDS, part) == ranked(reversed(IDS), part)
    assert sorted(ranked(IDS, part)) == IDS


def test_ranges_are_spread_over_the_nodes():
    homes = Counter(ranked(IDS, BlobRange(DIGEST, 4096 * RANGE, n))[0] for n in range(4096))
    assert len(homes) == len(IDS)
    assert max(homes.values()) < 1.4 * 4096 / len(IDS)


def test_a_node_that_goes_moves_only_what_it_was_at_home_to():
    gone = IDS[5]
    left = [node for node in IDS if node != gone]
    for number in range(200):
        part = BlobRange(DIGEST, 200 * RANGE, number)
        before = ranked(IDS, part)
        assert ranked(left, part) == [node for node in before if node != gone]


def test_blobs_have_other_homes_than_each_other():
    firsts = {ranked(IDS, BlobRange(Digest.of(bytes([number])), 5, 0))[0] for number in range(64)}
    assert len(firsts) > 8

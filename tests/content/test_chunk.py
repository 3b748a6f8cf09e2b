"""The decision to open another connection for a blob."""

from __future__ import annotations

from typing import Any

import pytest

from clowder_aimage.content.chunk import (
    LARGEST_CHUNK,
    MEASURING_TIME,
    PLENTY,
    SMALL,
    SMALLEST_CHUNK,
    BlobTransfer,
    Chunk,
    SmallConcurrency,
)
from clowder_aimage.oci import Descriptor, Digest
from tests.memory_store import MemoryIngest

SIZE = 8 * 1024**3


class Ingest(MemoryIngest):
    """An ingest of ``SIZE`` missing bytes."""

    def list_missing(self) -> list[Any]:
        return [(0, SIZE)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("clowder_aimage.content.chunk.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def blob(clock: list[float]) -> BlobTransfer:
    made = BlobTransfer(Descriptor("x/y", Digest("sha256", "ab" * 32), SIZE), Ingest({}, None))
    made.readers = 1
    return made


def test_no_connection_joins_before_the_speed_is_known(
    blob: BlobTransfer, clock: list[float]
) -> None:
    taken = blob.claim(3)
    assert taken is not None
    clock[0] += 5  # the registry was slow to respond
    assert not blob.may_be_joined
    blob.record_start(ranges=True)
    assert not blob.may_be_joined
    clock[0] += MEASURING_TIME
    taken.at += int(PLENTY * MEASURING_TIME / 2)
    assert blob.may_be_joined


def test_an_unthrottled_connection_is_not_joined(blob: Any, clock: list[float]) -> None:
    taken = blob.claim(3)
    blob.record_start(ranges=True)
    clock[0] += 1
    taken.at += int(1.1 * PLENTY)
    assert blob.is_fast
    assert not blob.may_be_joined
    clock[0] += 1  # and then it is throttled
    assert not blob.is_fast
    assert blob.may_be_joined


def test_a_third_connection_does_not_join_a_fast_link(
    blob: BlobTransfer, clock: list[float]
) -> None:
    first, second = blob.claim(3), blob.claim(3)
    assert first is not None and second is not None
    blob.readers = 2
    blob.record_start(ranges=True)
    clock[0] += 1
    first.at += PLENTY
    second.at += PLENTY // 2
    assert blob.may_be_joined
    second.at += PLENTY
    assert not blob.may_be_joined


def test_a_blob_without_ranges_is_never_joined(blob: BlobTransfer, clock: list[float]) -> None:
    blob.claim(3)
    blob.record_start(ranges=False)
    clock[0] += 60
    assert not blob.may_be_joined


@pytest.mark.parametrize(
    ("left", "seconds", "come", "is_worth"),
    [
        (2 * SMALLEST_CHUNK, 1.0, 0, True),
        (2 * SMALLEST_CHUNK - 1, 1.0, 0, False),  # one of the halves would be too small
        (2 * SMALLEST_CHUNK, 0.5, 0, True),
        (2 * SMALLEST_CHUNK, 0.49, 0, False),  # the speed is not known yet
        (8 * SMALLEST_CHUNK, 1.0, 15 * SMALLEST_CHUNK, True),
        (8 * SMALLEST_CHUNK, 1.0, 16 * SMALLEST_CHUNK, False),  # it arrives in half a second
        (8 * SMALLEST_CHUNK, 2.0, 16 * SMALLEST_CHUNK, True),
    ],
)
def test_a_part_is_shared_if_its_rest_takes_long(
    left: int, seconds: float, come: int, is_worth: bool, clock: list[float]
) -> None:
    part = Chunk(100, 100 + come + left)
    part.at += come
    clock[0] += seconds
    assert part.is_worth_sharing is is_worth


@pytest.mark.parametrize(
    ("size", "alignment", "middle"),
    [
        (10 * SMALLEST_CHUNK, 1, 5 * SMALLEST_CHUNK),
        (9 * SMALLEST_CHUNK + 3, 1, 5 * SMALLEST_CHUNK + 3),  # whole parts from the end
        (9 * SMALLEST_CHUNK + 3, SMALLEST_CHUNK, 6 * SMALLEST_CHUNK),
        (3 * SMALLEST_CHUNK, 1, 2 * SMALLEST_CHUNK),
    ],
)
def test_a_part_is_split_in_halves(size: int, alignment: int, middle: int) -> None:
    part = Chunk(0, size, alignment)
    other = part.split()
    assert [(each.start, each.at, each.end) for each in (part, other)] == [
        (0, 0, middle),
        (middle, middle, size),
    ]


@pytest.mark.parametrize(
    ("size", "sharing", "serial", "first"),
    [
        (SIZE, 3, False, LARGEST_CHUNK),
        (SIZE, 1, False, SIZE),
        (SIZE, 3, True, SIZE),  # the server ignores ranges
        (SMALL, 3, False, SMALL),
        (SMALL + 1, 3, False, SMALLEST_CHUNK),
        (64 * SMALLEST_CHUNK, 4, False, 8 * SMALLEST_CHUNK),  # half of a fair share
        (71 * SMALLEST_CHUNK, 4, False, 8 * SMALLEST_CHUNK),
    ],
)
def test_the_first_part_is_half_a_fair_share(
    size: int, sharing: int, serial: bool, first: int, clock: list[float]
) -> None:
    class Sized(MemoryIngest):
        def list_missing(self) -> list[Any]:
            return [(0, size)]

    content = Descriptor("x/y", Digest("sha256", "ab" * 32), size)
    blob = BlobTransfer(content, Sized({}, None))
    blob.serial = serial
    part = blob.claim(sharing)
    assert part is not None
    assert (part.start, part.end) == (0, first)
    assert blob.left == size
    part.at += 5
    blob.release(part)
    assert blob.unclaimed[0] == (5, first)
    assert blob.left == size - 5


# Cores, the processor time of each 0.2 s, and the number of connections after each.
SMALL_CONCURRENCY = {
    "busy": (2, [0.2, 0.25, 0.15], [3, 3, 3]),
    "a slow link": (2, [0.01, 0.02, 0.02], [6, 8, 8]),
    "a link that becomes slow": (2, [0.3, 0.05], [3, 6]),
    "many cores": (16, [0.3], [8]),
    "one core": (1, [0.2], [3]),
}


@pytest.mark.parametrize("name", SMALL_CONCURRENCY)
def test_small_blobs_have_connections_by_cores_and_by_waiting(name: str) -> None:
    cores, times, values = SMALL_CONCURRENCY[name]
    concurrency, used, seen = SmallConcurrency(8, cores), 5.0, []
    concurrency.record(100.0, used)
    for turn, time_used in enumerate(times, 1):
        used += time_used
        concurrency.record(100.0 + 0.2 * turn, used)
        seen.append(concurrency.value)
    assert seen == values


def test_a_short_time_changes_no_concurrency() -> None:
    concurrency = SmallConcurrency(8, 2)
    for turn in range(4):
        concurrency.record(100.0 + turn * MEASURING_TIME / 4, 5.0)
    assert concurrency.value == 3
    assert concurrency.may_grow
    assert not SmallConcurrency(3, 2).may_grow

"""The decision to open another connection for a blob."""

from __future__ import annotations

from typing import Any

import pytest

from clowder_aimage.content.chunk import LOOK, PLENTY, BlobTransfer
from clowder_aimage.oci import Descriptor, Digest
from tests.memory_store import MemoryIngest

SIZE = 8 * 1024**3


class Ingest(MemoryIngest):
    """An ingest of ``SIZE`` missing bytes."""

    def missing(self) -> list[Any]:
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
    blob.began(ranges=True)
    assert not blob.may_be_joined
    clock[0] += LOOK
    taken.at += int(PLENTY * LOOK / 2)
    assert blob.may_be_joined


def test_an_unthrottled_connection_is_not_joined(blob: Any, clock: list[float]) -> None:
    taken = blob.claim(3)
    blob.began(ranges=True)
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
    blob.began(ranges=True)
    clock[0] += 1
    first.at += PLENTY
    second.at += PLENTY // 2
    assert blob.may_be_joined
    second.at += PLENTY
    assert not blob.may_be_joined


def test_a_blob_without_ranges_is_never_joined(blob: BlobTransfer, clock: list[float]) -> None:
    blob.claim(3)
    blob.began(ranges=False)
    clock[0] += 60
    assert not blob.may_be_joined

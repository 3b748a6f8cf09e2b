"""Buffers that are written while a connection fills others."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from clowder_aimage.content.store import WrittenStream
from clowder_aimage.content.write_behind import _MAX_BUFFERS, BufferPool, WriteBehind


class Ingest:
    """An ingest whose writes and checkpoints wait until they may go on."""

    def __init__(self) -> None:
        self.may_write, self.may_sync = threading.Event(), threading.Event()
        self.written = bytearray()
        self.checkpoints = 0
        self.fails_at = -1

    def write_at(self, offset: int, data: memoryview, on_written: Any = None) -> None:
        assert self.may_write.wait(60)
        if offset == self.fails_at:
            raise OSError(28, "No space left on device")
        assert offset == len(self.written)
        self.written += data[:1]
        if on_written is not None:
            on_written(None)

    def checkpoint(self) -> None:
        assert self.may_sync.wait(60)
        self.checkpoints += 1


@pytest.fixture
def ingest() -> Any:
    return Ingest()


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(_MAX_BUFFERS)


@pytest.fixture
def writes(ingest: Any, pool: BufferPool) -> Iterator[WriteBehind]:
    writes = WriteBehind(pool)
    yield writes
    ingest.may_write.set()
    ingest.may_sync.set()
    writes.close()


def fill(writes: WriteBehind, ingest: Any, count: int, start: int = 0) -> None:
    for offset in range(start, start + count):
        buffer = writes.take()
        buffer[0] = offset
        writes.write(ingest, offset, buffer, 1)


def test_a_connection_goes_on_while_its_buffers_are_written(
    writes: WriteBehind, ingest: Any
) -> None:
    fill(writes, ingest, _MAX_BUFFERS)
    assert ingest.written == b""
    ingest.may_write.set()
    fill(writes, ingest, 10, _MAX_BUFFERS)
    writes.flush()
    assert ingest.written == bytes(range(_MAX_BUFFERS + 10))


class Stream(io.BytesIO, WrittenStream):
    """A stream that is told what of it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def record_written(self, count: int) -> None:
        self.written += count


def test_a_stream_is_told_what_is_written(writes: WriteBehind, ingest: Any) -> None:
    stream = Stream()
    with writes.flushing(stream):
        fill(writes, ingest, _MAX_BUFFERS)
        assert stream.written == 0
        ingest.may_write.set()
    assert stream.written == _MAX_BUFFERS
    with writes.flushing(io.BytesIO()):
        fill(writes, ingest, 1, _MAX_BUFFERS)
    assert stream.written == _MAX_BUFFERS
    with writes.flushing(stream):
        writes.write_now(ingest, _MAX_BUFFERS + 1, writes.take(), 1)
        assert stream.written == _MAX_BUFFERS + 1
        ingest.fails_at = _MAX_BUFFERS + 2
        with pytest.raises(OSError, match="No space"):
            writes.write_now(ingest, _MAX_BUFFERS + 2, writes.take(), 1)
    assert stream.written == _MAX_BUFFERS + 1


def test_a_stream_is_told_in_order_what_is_written(writes: WriteBehind) -> None:
    """A disk has several writes to do at the same time, and may end the last one first."""
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Late:
        def write_at(self, offset: int, data: memoryview, on_written: Any) -> None:
            ends.put(on_written)

    late: Any = Late()
    stream = Stream()
    with writes.flushing(stream):
        for count in (1, 10, 100):
            writes.write(late, 0, writes.take(), count)
        first, second, third = (ends.get(timeout=60) for _ in range(3))
        seen = []
        for end in (second, first, third):
            end(None)
            seen.append(stream.written)
    assert seen == [0, 11, 111]


def test_the_error_of_a_late_write_is_raised(writes: WriteBehind) -> None:
    class Failing:
        def write_at(self, offset: int, data: memoryview, on_written: Any) -> None:
            on_written(OSError(28, "No space left on device"))

    failing: Any = Failing()
    stream = Stream()
    with pytest.raises(OSError, match="No space"), writes.flushing(stream):
        writes.write(failing, 0, writes.take(), 1)
    assert stream.written == 0


def test_connections_share_additional_buffers(ingest: Any) -> None:
    pool = BufferPool(1)
    first, second = WriteBehind(pool), WriteBehind(pool)
    fill(first, ingest, 2)
    other: Any = Ingest()
    fill(second, other, 1)
    taken: list[memoryview] = []
    thread = threading.Thread(target=lambda: taken.append(second.take()))
    thread.start()
    assert not taken
    other.may_write.set()
    thread.join(60)
    assert len(taken) == 1
    ingest.may_write.set()
    first.close()
    # The buffer of the first may be used now
    assert pool.take_extra() is not None
    second.close()


def test_the_buffers_of_a_chunk_are_those_of_the_next_one(ingest: Any) -> None:
    pool, seen = BufferPool(), set()
    ingest.may_write.set()
    for turn in range(4):
        writes = WriteBehind(pool)
        for offset in (2 * turn, 2 * turn + 1):
            with writes.flushing(io.BytesIO()):
                buffer = writes.take()
                seen.add(id(buffer.obj))
                writes.write(ingest, offset, buffer, 1)
        writes.close()
    assert len(seen) == 1


def test_an_error_ends_the_writes(writes: WriteBehind, ingest: Any) -> None:
    ingest.fails_at = 1
    fill(writes, ingest, 3)
    ingest.may_write.set()
    with pytest.raises(OSError, match="No space"):
        writes.flush()
    assert ingest.written == b"\0"
    for call in (writes.take, writes.flush):
        with pytest.raises(OSError, match="No space"):
            call()


def test_writes_go_on_during_a_checkpoint(writes: WriteBehind, ingest: Any) -> None:
    ingest.may_write.set()
    writes.checkpoint(ingest)
    # The first one is still running
    writes.checkpoint(ingest)
    fill(writes, ingest, 2 * _MAX_BUFFERS)
    ingest.may_sync.set()
    writes.flush()
    assert (len(ingest.written), ingest.checkpoints) == (2 * _MAX_BUFFERS, 1)


def test_a_failed_checkpoint_fails_the_transfer(
    writes: WriteBehind, ingest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ingest, "checkpoint", fail)
    writes.checkpoint(ingest)
    with pytest.raises(OSError, match="Input/output"):
        writes.flush()


class LateQueue(queue.SimpleQueue[memoryview]):
    """Buffers of which none is free at first."""

    def get_nowait(self) -> memoryview:
        raise queue.Empty


@pytest.mark.parametrize("count", [1, 2])
def test_a_slow_disk_is_noticed_by_connections_with_several_buffers(count: int) -> None:
    writes = WriteBehind(BufferPool(0))
    writes._count = count
    states = []
    for free in (LateQueue(), queue.SimpleQueue[memoryview]()):
        writes._free = free
        for _ in range(4):
            free.put(memoryview(b""))
            writes.take()
            states.append(writes.is_behind)
    writes.close()
    is_slow = count > 1
    assert states == [False, False, is_slow, is_slow, is_slow, False, False, False]

"""Writes of a connection that receives more meanwhile.

Receiving, hashing and writing take about the same time: one after the other, each waits for the
other two most of the time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from clowder_aimage.content.buffer import LARGEST_READ, new_buffer
from clowder_aimage.content.store import Ingest, Reader, WrittenStream

# Bytes. A smaller blob costs more to hand to another thread than to write.
BEHIND_SIZE = 4 * 1024 * 1024
# Buffers that one connection may fill before the first is written
_MAX_BUFFERS = 4
# Buffers of all connections of a copy, in addition to one for each
EXTRA_BUFFERS = 3
# Weight of the last buffer in the share of those that had to be waited for
_WEIGHT = 0.25


class BufferPool:
    """The buffers of a copy: one for each connection that receives a chunk, and ``extra`` ones.

    Those that were used last are used next: the others need no memory.
    """

    def __init__(self, extra: int = EXTRA_BUFFERS) -> None:
        self._extra = threading.Semaphore(extra)
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """Return the first buffer of a connection."""
        try:
            return self._idle.pop()
        except IndexError:
            # It takes no memory before it is filled
            return new_buffer(LARGEST_READ)

    def take_extra(self) -> memoryview | None:
        """Return another buffer, if there is any."""
        return self.take() if self._extra.acquire(blocking=False) else None

    def put(self, buffers: list[memoryview], count: int) -> None:
        """Return the buffers of a connection that had ``count``."""
        self._idle += buffers
        if count > 1:
            self._extra.release(count - 1)


@dataclass(slots=True, eq=False)
class _Write:
    """A write of the first ``count`` bytes of a buffer."""

    ingest: Ingest
    offset: int
    buffer: memoryview
    count: int
    has_ended: bool = False


class WriteBehind:
    """The buffers of one connection, and the threads that write and synchronise its large blobs."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._count = 0
        # Calls of the thread that hashes in order, and the end of it
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._checkpoint: threading.Thread | None = None
        self._error: BaseException | None = None
        # The recent share of buffers that were not free
        self._waits = 0.0
        # Called with the bytes of each write, in order
        self._record: Callable[[int], None] | None = None
        # Writes that have not ended, or not those before them
        self._writes: deque[_Write] = deque()
        self._ended = threading.Condition()

    @property
    def is_behind(self) -> bool:
        """True if bytes arrive faster than they are hashed and written."""
        return self._waits > 0.5

    def take(self) -> memoryview:
        """Return a buffer that is not in use; wait for one. Raises the error of a write."""
        self._raise()
        self._waits *= 1 - _WEIGHT
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._count < _MAX_BUFFERS:
                buffer = self._pool.take_extra() if self._count else self._pool.take()
                if buffer is not None:
                    self._count += 1
                    return buffer
            # A connection with one buffer waits for each write, whatever the speed of the disk
            self._waits += _WEIGHT if self._count > 1 else 0.0
            return self._free.get()

    def write(self, ingest: Ingest, offset: int, buffer: memoryview, count: int) -> None:
        """Write the first bytes of a buffer that was taken, later."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aimage-ingest")
            self._thread.start()
        write = _Write(ingest, offset, buffer, count)
        with self._ended:
            self._writes.append(write)
        self._calls.put(partial(self._write, write))

    def write_now(self, ingest: Ingest, offset: int, buffer: memoryview, count: int) -> None:
        """Write the first bytes of a buffer that was taken."""
        ingest.write_at(offset, buffer[:count])
        if self._record is not None:
            self._record(count)
        self._free.put(buffer)

    def checkpoint(self, ingest: Ingest) -> None:
        """Make what is written durable, later; not while the last checkpoint is running."""
        if self._checkpoint is None or not self._checkpoint.is_alive():
            checkpoint = partial(self._attempt, ingest.checkpoint)
            self._checkpoint = threading.Thread(target=checkpoint, name="aimage-checkpoint")
            self._checkpoint.start()

    @contextlib.contextmanager
    def flushing(self, reader: Reader) -> Iterator[None]:
        """Write what is read from a reader, and tell it; at the end, wait for all writes.

        The buffers are then free for other connections.

        Raises the error of the first write that failed.
        """
        self._record = reader.record_written if isinstance(reader, WrittenStream) else None
        try:
            yield
        finally:
            try:
                self.flush()
            finally:
                self._return_buffers()

    def _return_buffers(self) -> None:
        buffers = []
        with contextlib.suppress(queue.Empty):
            while True:
                buffers.append(self._free.get_nowait())
        self._pool.put(buffers, self._count)
        self._count = 0

    def flush(self) -> None:
        """Wait for all writes. Raises the error of the first that failed."""
        with self._ended:
            while self._writes:
                self._ended.wait()
        if self._checkpoint is not None:
            self._checkpoint.join()
        self._raise()

    def close(self) -> None:
        """End the threads, and return the buffers."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
        if self._checkpoint is not None:
            self._checkpoint.join()
        self._return_buffers()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _write(self, write: _Write) -> None:
        # After an error, the ranges before it must not be followed by others
        if self._error is not None:
            self._end(write, self._error)
            return
        view = write.buffer[: write.count]
        try:
            write.ingest.write_at(write.offset, view, partial(self._end, write))
        except BaseException as error:
            self._end(write, error)

    def _end(self, write: _Write, error: BaseException | None) -> None:
        """Record the end of a write. Writes may end in another order than that of their bytes."""
        self._error = self._error or error
        self._free.put(write.buffer)
        with self._ended:
            write.has_ended = True
            while self._writes and self._writes[0].has_ended:
                first = self._writes.popleft()
                if self._record is not None and self._error is None:
                    self._attempt(partial(self._record, first.count))
            if not self._writes:
                self._ended.notify()

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = self._error or error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

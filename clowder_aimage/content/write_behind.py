"""Writes of a connection that receives more meanwhile.

Receiving, and hashing while writing, take about the same time: one after the other, each waits half
of it for the other one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.store import Ingest, Reader, WrittenStream

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

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
            return new_buffer()

    def take_extra(self) -> memoryview | None:
        """Return another buffer, if there is any."""
        return self.take() if self._extra.acquire(blocking=False) else None

    def put(self, buffers: list[memoryview], count: int) -> None:
        """Return the buffers of a connection that had ``count``."""
        self._idle += buffers
        if count > 1:
            self._extra.release(count - 1)


class WriteBehind:
    """The buffers of one connection, and the threads that write and synchronise its large blobs."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._count = 0
        # One thread that writes in order, and one for checkpoints
        self._threads: list[ThreadPoolExecutor] = []
        self._checkpoint: Future[None] | None = None
        self._error: BaseException | None = None
        # The recent share of buffers that were not free
        self._waits = 0.0
        # Called with the bytes of each write
        self._record: Callable[[int], None] | None = None

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
        self._submit(0, partial(self._write, ingest, offset, buffer, count))

    def write_now(self, ingest: Ingest, offset: int, buffer: memoryview, count: int) -> None:
        """Write the first bytes of a buffer that was taken."""
        self._write_at(ingest, offset, buffer, count)
        self._free.put(buffer)

    def checkpoint(self, ingest: Ingest) -> None:
        """Make what is written durable, later; not while the last checkpoint is running."""
        if self._checkpoint is None or self._checkpoint.done():
            self._checkpoint = self._submit(1, partial(self._attempt, ingest.checkpoint))

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
        if self._threads:
            self._submit(0, lambda: None).result()
        if self._checkpoint is not None:
            self._checkpoint.result()
        self._raise()

    def close(self) -> None:
        """End the threads, and return the buffers."""
        for thread in self._threads:
            thread.shutdown()
        self._return_buffers()

    def _submit(self, thread: int, call: Callable[[], None]) -> Future[None]:
        if not self._threads:
            from concurrent.futures import ThreadPoolExecutor

            # Each begins with its first call
            names = ("aimage-ingest", "aimage-checkpoint")
            self._threads = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in names]
        return self._threads[thread].submit(call)

    def _write(self, ingest: Ingest, offset: int, buffer: memoryview, count: int) -> None:
        # After an error, the ranges before it must not be followed by others
        if self._error is None:
            self._attempt(partial(self._write_at, ingest, offset, buffer, count))
        self._free.put(buffer)

    def _write_at(self, ingest: Ingest, offset: int, buffer: memoryview, count: int) -> None:
        ingest.write_at(offset, buffer[:count])
        if self._record is not None:
            self._record(count)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = self._error or error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

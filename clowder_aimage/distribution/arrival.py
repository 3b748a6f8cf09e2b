"""Content that is read while it arrives, by threads and in event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

from clowder_aimage.errors import AImageError


class Arrival:
    """The progress of content of ``size`` bytes that arrives in order. Thread-safe.

    It holds no bytes: any number of clients wait here, and read the file where they are written.
    ``front`` bytes may be read. ``end`` is called once, with an error or with all bytes.
    """

    def __init__(self, size: int) -> None:
        self.front = 0
        # The time of the last progress, by which a stalled transfer is found
        self.moved = time.monotonic()
        self._size = size
        self._error: AImageError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._wakers: list[Callable[[], object]] = []

    def advance(self, front: int) -> None:
        """Record that ``front`` bytes may be read."""
        with self._lock:
            self.front, self.moved = max(self.front, front), time.monotonic()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            # The event loop of a client that disconnected may be closed
            with contextlib.suppress(RuntimeError):
                wake()

    def end(self, error: AImageError | None = None) -> None:
        """Record the end: all bytes may be read, or no more will arrive because of ``error``."""
        self._error = error
        self._ended.set()
        self.advance(0 if error else self._size)

    async def wait(self, offset: int) -> int:
        """Wait until more than ``offset`` bytes may be read, or no more arrive; return the number.

        Raises the error of ``end`` if there are not more than ``offset``.
        """
        loop = asyncio.get_running_loop()
        while True:
            moved = asyncio.Event()
            with self._lock:
                if self.front > offset or self._ended.is_set():
                    break
                self._wakers.append(partial(loop.call_soon_threadsafe, moved.set))
            await moved.wait()
        if self._error is not None and self.front <= offset:
            raise self._error
        return self.front

    def join(self, seconds: float) -> bool:
        """Wait in a thread until it has ended; return False after ``seconds``."""
        return self._ended.wait(seconds)

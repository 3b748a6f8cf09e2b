"""A limit on bytes per second, shared by all connections of a command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Rate:
    """A limit of bytes per second on average, kept by small waits of each connection."""

    def __init__(
        self,
        limit: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    @property
    def burst(self) -> int:
        """Return the bytes of one read, so that the wait after it is short."""
        return max(4096, int(self._limit / 8))

    def passed(self, count: int) -> None:
        """Account for ``count`` bytes, and wait until they were due."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + count / self._limit
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)

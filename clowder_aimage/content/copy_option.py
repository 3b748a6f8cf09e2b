"""The options of a copy: concurrency, the listener of its events, and a limit on its speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.oci import Descriptor

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """A step of a copy.

    ``kind`` is ``plan`` (blobs and bytes of the whole), ``skip`` (already there), ``start``,
    ``progress`` (``count`` more bytes; negative when a retry begins again) or ``done``. A blob that
    is mounted starts, is skipped, and is then done. A ``progress`` of more than a chunk is what an
    earlier run left.
    """

    kind: str
    content: Descriptor | None = None
    count: int = 0
    blobs: int = 0


OnEvent = Callable[[CopyEvent], None]


def ignore(_: CopyEvent) -> None:
    """Do nothing with an event."""


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


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Options of a copy: how many blobs at a time, the listener, and a limit on the speed."""

    concurrency: int = DEFAULT_CONCURRENCY
    on_event: OnEvent = ignore
    rate: Rate | None = None

"""The options of a copy: concurrency, event listener and rate limit."""

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

    ``kind`` is ``plan`` (the total of blobs and bytes), ``skip`` (already in the target),
    ``start``, ``progress`` (``count`` more bytes; negative when a retry starts over), ``wait`` (for
    the process ``count`` that writes the blob, 0 if unknown) or ``done``. A mounted blob has the
    events ``start``, ``skip`` and ``done``. A ``progress`` of more than LARGEST_READ counts bytes
    from an earlier run.
    """

    kind: str
    content: Descriptor | None = None
    count: int = 0
    blobs: int = 0


OnEvent = Callable[[CopyEvent], None]


def ignore(_: CopyEvent) -> None:
    """Ignore an event."""


class Rate:
    """A limit on the average bytes per second, enforced by short waits of each connection."""

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

    def consume(self, count: int) -> None:
        """Account for ``count`` bytes, and wait as the limit requires."""
        with self._lock:
            timestamp = self._clock()
            # Connections share the schedule: each waits until its own bytes are due.
            self._free_at = max(self._free_at, timestamp) + count / self._limit
            wait = self._free_at - timestamp
        if wait > 0:
            self._sleep(wait)


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Options of a copy: concurrency, event listener and rate limit.

    With ``is_ordered``, blobs are started in the given order: a caller uses the first ones early.
    Chunks of large blobs use up to ``max_concurrency`` connections, if that is more than
    ``concurrency`` and each connection is slow.
    """

    concurrency: int = DEFAULT_CONCURRENCY
    on_event: OnEvent = ignore
    rate: Rate | None = None
    is_ordered: bool = False
    max_concurrency: int = 0

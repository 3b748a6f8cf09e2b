"""The number of connections that pays for large blobs."""

from __future__ import annotations

START = 3
_SHARE = 0.5  # of the speed of the connections before, which further ones must reach
_WARM = 0.2  # seconds before the speed of new connections counts
_WINDOW = 0.4  # seconds that a rate is measured over, at least
PLENTY = 256 * 1024 * 1024  # bytes per second over one connection that is not limited
_LEAST = 4 * 1024 * 1024  # bytes a connection that a rate is measured over, at least


class ConcurrencyProbe:
    """A number of connections, doubled while the speed grows with it.

    Where each connection is limited (an object store, a long round trip), every further one adds
    its share. Where the machine or the link is the limit, further ones only make chunks arrive out
    of order, and these must be read again for the hash.
    """

    def __init__(self, limit: int) -> None:
        self.value = min(START, limit)
        self._limit = limit
        self._before = 0.0  # bytes per second, with fewer connections
        self._previous = self.value
        self._began: float | None = None
        self._bytes = 0
        self.settled = self.value == limit

    def passed(self, count: int, now: float) -> None:
        """Account for ``count`` bytes that have arrived by ``now``, in seconds."""
        if self.settled:
            return
        if self._began is None:
            self._began = now + _WARM
        if now <= self._began:
            return
        self._bytes += count
        elapsed = now - self._began
        if elapsed < _WINDOW or self._bytes < _LEAST * self.value:
            return
        rate = self._bytes / elapsed
        wanted = 1 + _SHARE * (self.value / self._previous - 1)
        if rate < self._before * wanted:
            self.value, self.settled = self._previous, True
            return
        if rate > PLENTY * self.value:
            self.settled = True
            return
        self._before, self._previous = rate, self.value
        self.value = min(self._limit, 2 * self.value)
        self.settled = self.value == self._previous
        self._began, self._bytes = None, 0

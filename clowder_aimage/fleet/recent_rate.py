"""The rate of events in the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Seconds in which events count, and the shortest time over which they are averaged.
WINDOW, SHORTEST = 300.0, 60.0


class RecentRate:
    """Counts events by seconds, for WINDOW; earlier ones are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        # The second and the number of its events.
        self._counts: deque[tuple[int, int]] = deque()

    def record(self) -> None:
        """Count an event that happens now."""
        second = int(self._clock())
        count = self._counts.pop()[1] if self._counts and self._counts[-1][0] == second else 0
        self._counts.append((second, count + 1))
        self._forget()

    def compute_per_minute(self) -> float:
        """Return the events of a minute, in the mean of WINDOW or of the time since the start."""
        self._forget()
        seconds = min(WINDOW, max(SHORTEST, self._clock() - self._start))
        return sum(count for _, count in self._counts) * 60 / seconds

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW
        while self._counts and self._counts[0][0] < oldest:
            self._counts.popleft()

"""The room of a worker for jobs."""

from __future__ import annotations

from collections import Counter

AHEAD = 2  # jobs for pictures of one model: one is served, and one follows it without a pause


class Room:
    """Counts jobs by digest. A model at work takes a slot; texts of one model share it."""

    def __init__(self, slots: int, parallel: int) -> None:
        self.slots, self._parallel = slots, parallel
        self._jobs: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """The number of jobs."""
        return self._jobs.total()

    def of(self, digest: str) -> int:
        """Return the number of jobs for a digest."""
        return self._jobs[digest]

    def has(self, digest: str, *, is_text: bool) -> bool:
        """Return whether there is room for a job."""
        if digest in self._jobs:
            return self._jobs[digest] < (self._parallel if is_text else AHEAD)
        return len(self._jobs) < self.slots

    def take(self, digest: str) -> None:
        """Count a job."""
        self._jobs[digest] += 1

    def leave(self, digest: str) -> None:
        """Count a job as ended."""
        self._jobs[digest] -= 1
        if not self._jobs[digest]:
            del self._jobs[digest]

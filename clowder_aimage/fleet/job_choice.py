"""The order in which a worker asks for jobs: first those whose model is in its memory.

There is no scheduler. Every worker with room hears of new jobs and asks for them, some at once and
some after a short wait, so that a worker that is better suited comes first. A worker that has gone
cannot hold up a job for longer than that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clowder_aimage.fleet.fleet_name import PRIORITIES

AT_ONCE = 0.0  # seconds to wait if the model is in memory here
FOLLOW = 0.05  # if a job of the model is being served here: workers without work come first
ON_DISK = 0.01  # if it is in the store here, and in no memory
ELSEWHERE = 1.0  # if it is in the memory of another worker: about the time to load a model
EVICT = (
    0.1  # more, at most, if another model leaves memory for it: less, the longer that one is idle
)
AGAIN = 0.006  # at most, if others have it in memory too: the one that used it last comes first
FETCH = 0.05  # if it would be fetched, and no other worker has it
FETCH_TOO = 5.0  # if it would be fetched, and another worker has it
FORGET = 600.0  # seconds after which a digest that no announcement named is forgotten

IDLE = 10.0  # seconds after which a model in memory counts as idle

Key = tuple[str, str]  # a priority and the hexadecimal part of a digest


def to_load(idle: float | None, *, is_elsewhere: bool) -> float:
    """Return the seconds to wait before a model in the store is loaded.

    ``idle`` are the seconds since the last use of the model that would leave memory for it; None if
    there is room. So of all workers the one whose model is missed least comes first.
    """
    wait = ELSEWHERE if is_elsewhere else ON_DISK
    return wait if idle is None else wait + EVICT / (1 + idle)


def to_repeat(idle: float) -> float:
    """Return the seconds to wait with a model in memory that other workers have there too.

    Jobs gather at the copies that were used last, and the others may leave memory.
    """
    return AGAIN * min(idle, IDLE) / IDLE


@dataclass(slots=True)
class JobChoice:
    """The queues that may have jobs: by priority and digest, with the time of the first news.

    ``wait`` returns the seconds to wait before asking for jobs of a digest, or None if this worker
    cannot serve it.
    """

    wait: Callable[[str], float | None]
    _since: dict[Key, float] = field(default_factory=dict)

    def hear(self, key: Key, now: float) -> None:
        """Take the news of a job."""
        self._since.setdefault(key, now)

    def forget(self, key: Key) -> None:
        """Note that a queue is empty."""
        self._since.pop(key, None)

    def again(self, key: Key, now: float) -> None:
        """Note that a queue had a job and may have more."""
        if key in self._since:
            self._since[key] = now

    def next(self, now: float) -> tuple[Key | None, float | None]:
        """Return the queue to ask now, or None and the seconds until there is one.

        Interactive jobs come first, then what needs the least wait, then what was heard of first.
        The seconds are None if nothing waits.
        """
        soonest: float | None = None
        best: tuple[tuple[int, float, float], Key] | None = None
        for key, since in list(self._since.items()):
            wait = self.wait(key[1])
            if wait is None or now - since > FORGET:
                if now - since > FORGET:
                    del self._since[key]
                continue
            left = since + wait - now
            if left > 0:
                soonest = left if soonest is None else min(soonest, left)
                continue
            rank = PRIORITIES.index(key[0]), wait, since
            if best is None or rank < best[0]:
                best = rank, key
        return (best[1], 0.0) if best else (None, soonest)

"""The order of a worker's requests for jobs: first those whose model is in its memory.

There is no scheduler. Every worker with a free slot receives the announcements of new jobs and asks
for them, some at once and some after a short wait, so that a better suited worker comes first.
Workers that are suited alike wait in the order of their ranks; each computes its rank from the
status of all. A worker that has vanished delays a job by one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from clowder_aimage.fleet.name import PRIORITIES

# Seconds to wait if the model is in memory here.
AT_ONCE = 0.0
# For each rank, if others have it in memory too.
REPEAT = 0.005
# If a job of the model is being served here: workers without work come first.
FOLLOW = 0.05
# If it is in the store here, and in the memory of no worker.
ON_DISK = 0.01
# More for each rank among the workers that could load it.
STEP = 0.03
# If it is in the memory of another worker: about the time to load a model.
ELSEWHERE = 1.0
# More, if a model that no other worker has in memory would be unloaded for it.
EVICT = 1.0
# If it would be fetched, and no other worker has it.
FETCH = 0.05
# If it would be fetched, and another worker has it.
FETCH_TOO = 5.0
# Seconds after giving a job back in which only new jobs of its queue are taken.
LEFT = 3.0
# Seconds after which a digest that no announcement named is forgotten.
FORGET = 600.0
# Queues, and jobs of one queue, that are remembered.
MOST = 1000
# Ranks after this one wait as long.
_LAST = 8

# A priority and the hexadecimal part of a digest.
Key = tuple[str, str]


def claim_delay_loaded(rank: int) -> float:
    """Return the seconds before a job is claimed whose model is in memory, here and elsewhere.

    Jobs gather at the copies with the first ranks, and the others may leave memory.
    """
    return REPEAT * min(rank, _LAST)


def claim_delay_stored(
    rank: int, *, is_elsewhere: bool = False, evicts_last_copy: bool = False
) -> float:
    """Return the seconds before a job is claimed whose model is in the store.

    ``is_elsewhere``: another worker has it in memory, or loads it. ``evicts_last_copy``: the model
    that would be unloaded for it is in no other memory, so that it would be loaded again soon.
    """
    wait = STEP * min(rank, _LAST)
    if not is_elsewhere:
        return wait + ON_DISK
    return wait + ELSEWHERE + (EVICT if evicts_last_copy else 0.0)


@dataclass(slots=True)
class JobChoice:
    """The queues that may have jobs: by priority and digest, with the times of announcements.

    ``wait`` returns the seconds to wait before asking for jobs of a digest, or None if this worker
    cannot serve it; ``lacks_room`` returns True if it could after other jobs have ended. Jobs have
    their numbers in the stream; number 0 is a job without an announcement.
    """

    wait: Callable[[str], float | None]
    lacks_room: Callable[[str], bool] = lambda _: False
    _announced: dict[Key, dict[int, float]] = field(default_factory=dict)
    _released_until: dict[Key, float] = field(default_factory=dict)

    def record(self, key: Key, time: float, number: int = 0) -> None:
        """Record an announcement; keep at most MOST: the first ones and the last one."""
        is_known = key in self._announced or len(self._announced) < MOST
        if is_known and (number or self._released_until.get(key, time) <= time):
            announced = self._announced.setdefault(key, {})
            if len(announced) >= MOST:
                announced.popitem()
            announced.setdefault(number, time)

    def leave(self, key: Key, time: float) -> None:
        """Record a job that was given back: it stays on the queue, for another worker."""
        current = ((queue, until) for queue, until in self._released_until.items() if until > time)
        self._released_until = dict(current)
        self._released_until[key] = time + LEFT
        if self._announced.get(key, {}).keys() <= {0}:
            self.forget(key)
        else:
            self._announced[key].pop(0, None)

    def forget(self, key: Key, request_time: float = math.inf) -> None:
        """Note that a queue was empty when it was ``request_time``."""
        newer = {
            number: at for number, at in self._announced.pop(key, {}).items() if at > request_time
        }
        if newer:
            self._announced[key] = newer

    def record_delivery(self, key: Key, number: int) -> None:
        """Record that all jobs of a queue up to a number were delivered to workers."""
        announced = self._announced.get(key, {})
        for announced_number in [
            announced_number for announced_number in announced if 0 < announced_number <= number
        ]:
            del announced[announced_number]
        if not announced:
            self.forget(key)

    def is_wanted(self, digest: str) -> bool:
        """Return True if jobs for a digest are on the queue."""
        return any(
            key[1] == digest and any(announced) for key, announced in self._announced.items()
        )

    def select_next(self, time: float) -> tuple[Key | None, float | None]:
        """Return the queue to ask now, or None and the seconds until there is one.

        Interactive jobs come first, then those with the shortest wait, then the oldest ones.
        No job follows one that is being served while an earlier one of another model, or a more
        urgent one, lacks room. The seconds are None if nothing waits.
        """
        first_without_room = self._find_without_room()
        soonest: float | None = None
        best: tuple[tuple[int, float, float], Key] | None = None
        for key in list(self._announced):
            since, wait = self._get_oldest_time(key), self.wait(key[1])
            if time - since > FORGET:
                del self._announced[key]
            elif wait is not None and (left := since + wait - time) > 0:
                soonest = left if soonest is None else min(soonest, left)
            elif (
                wait == FOLLOW
                and first_without_room is not None
                and first_without_room < (PRIORITIES.index(key[0]), since)
            ):
                continue
            elif wait is not None:
                rank = PRIORITIES.index(key[0]), wait, since
                if best is None or rank < best[0]:
                    best = rank, key
        return (best[1], 0.0) if best else (None, soonest)

    def _find_without_room(self) -> tuple[int, float] | None:
        """Return the priority and the time of the first job that could be served next."""
        waiting = (
            (PRIORITIES.index(key[0]), self._get_oldest_time(key))
            for key, announced in self._announced.items()
            if any(announced) and self.lacks_room(key[1])
        )
        return min(waiting, default=None)

    def is_due(self, key: Key, time: float) -> bool:
        """Return True if a job of a queue has waited long enough for this worker."""
        wait = self.wait(key[1]) if key in self._announced else None
        return wait is not None and self._get_oldest_time(key) + wait <= time

    def _get_oldest_time(self, key: Key) -> float:
        """Return the time of the announcement of a queue's oldest job.

        Number 0 counts last: a look at the queue also finds jobs that are being served.
        """
        announced = self._announced[key]
        return min(
            (at for number, at in announced.items() if number), default=announced.get(0, 0.0)
        )

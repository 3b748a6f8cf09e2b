"""The order in which a worker asks for jobs: first those whose model is in its memory.

There is no scheduler. Every worker with room hears of new jobs and asks for them, some at once and
some after a short wait, so that a worker that is better suited comes first. Workers that are suited
alike wait in the order of their ranks, which each of them computes from the status of all. A worker
that has vanished delays a job by one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from clowder_aimage.fleet.name import PRIORITIES

AT_ONCE = 0.0  # seconds to wait if the model is in memory here
REPEAT = 0.005  # for each rank, if others have it in memory too
FOLLOW = 0.05  # if a job of the model is being served here: workers without work come first
ON_DISK = 0.01  # if it is in the store here, and in no memory
STEP = 0.03  # more for each rank among the workers that could load it
ELSEWHERE = 1.0  # if it is in the memory of another worker: about the time to load a model
EVICT = 1.0  # more, if a model that no other worker has in memory would be unloaded for it
FETCH = 0.05  # if it would be fetched, and no other worker has it
FETCH_TOO = 5.0  # if it would be fetched, and another worker has it
LEFT = 3.0  # seconds after giving a job back in which only new jobs of its queue are taken
FORGET = 600.0  # seconds after which a digest that no announcement named is forgotten
MOST = 1000  # queues, and jobs of one queue, that are remembered
_LAST = 8  # ranks after this one wait as long

Key = tuple[str, str]  # a priority and the hexadecimal part of a digest


def claim_delay_loaded(rank: int) -> float:
    """Return the seconds before a job is claimed whose model is in memory, here and elsewhere.

    Jobs gather at the copies with the first ranks, and the others may leave memory.
    """
    return REPEAT * min(rank, _LAST)


def claim_delay_stored(rank: int, *, is_elsewhere: bool = False, is_missed: bool = False) -> float:
    """Return the seconds before a job is claimed whose model is in the store.

    ``is_elsewhere``: another worker has it in memory, or loads it. ``is_missed``: the model that
    would be unloaded for it is in no other memory, so that it would be loaded again soon.
    """
    wait = STEP * min(rank, _LAST)
    if not is_elsewhere:
        return wait + ON_DISK
    return wait + ELSEWHERE + (EVICT if is_missed else 0.0)


@dataclass(slots=True)
class JobChoice:
    """The queues that may have jobs: by priority and digest, with the times of announcements.

    ``wait`` returns the seconds to wait before asking for jobs of a digest, or None if this worker
    cannot serve it; ``lacks_room`` returns whether it could, if others had ended. Jobs are known by
    their numbers in the stream; number 0 is a job of which nothing else is known.
    """

    wait: Callable[[str], float | None]
    lacks_room: Callable[[str], bool] = lambda _: False
    _announced: dict[Key, dict[int, float]] = field(default_factory=dict)
    _released_until: dict[Key, float] = field(default_factory=dict)

    def record(self, key: Key, now: float, number: int = 0) -> None:
        """Record an announcement; keep at most MOST: the first ones and the last one."""
        is_known = key in self._announced or len(self._announced) < MOST
        if is_known and (number or self._released_until.get(key, now) <= now):
            known = self._announced.setdefault(key, {})
            if len(known) >= MOST:
                known.popitem()
            known.setdefault(number, now)

    def leave(self, key: Key, now: float) -> None:
        """Note that a job was given back: it is found on the queue, and is for another worker."""
        current = ((one, until) for one, until in self._released_until.items() if until > now)
        self._released_until = dict(current)
        self._released_until[key] = now + LEFT
        if self._announced.get(key, {}).keys() <= {0}:
            self.forget(key)
        else:
            self._announced[key].pop(0, None)

    def forget(self, key: Key, asked: float = math.inf) -> None:
        """Note that a queue was empty when it was ``asked``."""
        known = {number: at for number, at in self._announced.pop(key, {}).items() if at > asked}
        if known:
            self._announced[key] = known

    def delivered(self, key: Key, number: int) -> None:
        """Note that all jobs of a queue up to a number were delivered to workers."""
        known = self._announced.get(key, {})
        for one in [one for one in known if 0 < one <= number]:
            del known[one]
        if not known:
            self.forget(key)

    def is_wanted(self, digest: str) -> bool:
        """Return whether jobs for a digest are on the queue."""
        return any(key[1] == digest and any(known) for key, known in self._announced.items())

    def next(self, now: float) -> tuple[Key | None, float | None]:
        """Return the queue to ask now, or None and the seconds until there is one.

        Interactive jobs come first, then what needs the least wait, then what was heard of first.
        No job follows one that is being served while an earlier one of another model, or a more
        urgent one, lacks room. The seconds are None if nothing waits.
        """
        first = self._first_without_room()
        soonest: float | None = None
        best: tuple[tuple[int, float, float], Key] | None = None
        for key in list(self._announced):
            since, wait = self._since(key), self.wait(key[1])
            if now - since > FORGET:
                del self._announced[key]
            elif wait is not None and (left := since + wait - now) > 0:
                soonest = left if soonest is None else min(soonest, left)
            elif wait == FOLLOW and first is not None and first < (PRIORITIES.index(key[0]), since):
                continue
            elif wait is not None:
                rank = PRIORITIES.index(key[0]), wait, since
                if best is None or rank < best[0]:
                    best = rank, key
        return (best[1], 0.0) if best else (None, soonest)

    def _first_without_room(self) -> tuple[int, float] | None:
        """Return the priority and the time of the first job that could be served next."""
        found = (
            (PRIORITIES.index(key[0]), self._since(key))
            for key, known in self._announced.items()
            if any(known) and self.lacks_room(key[1])
        )
        return min(found, default=None)

    def is_due(self, key: Key, now: float) -> bool:
        """Return whether a job of a queue has waited long enough for this worker."""
        wait = self.wait(key[1]) if key in self._announced else None
        return wait is not None and self._since(key) + wait <= now

    def _since(self, key: Key) -> float:
        """Return when a queue's oldest job was heard of; others of which more is known come first.

        A look at the queue also finds jobs that are being served, so what it finds counts last.
        """
        known = self._announced[key]
        return min((at for one, at in known.items() if one), default=known.get(0, 0.0))

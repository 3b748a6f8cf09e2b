"""The queue in a gateway: jobs wait here before they are published, fairly by caller.

The queue in NATS is served in order. So that a caller with a thousand jobs does not let all others
wait, a gateway puts only as many jobs of a model there as the workers will soon begin; the others
wait here, and each caller has its turn. Interactive jobs come before those of batches. Jobs of a
model that no worker takes hold up no other model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable

from clowder_aimage.engine.admission import (
    MAX_WAITING,
    BusyError,
    CallerBusyError,
    Pace,
    compute_retry,
    compute_share,
)
from clowder_aimage.fleet.name import PRIORITIES

# Times the number of jobs that may wait, however short the wait is estimated.
_MOST = 4
# Of the bound of the estimated wait, for one caller.
_CALLER_SHARE = 0.75
_Turn = asyncio.Future[None]
_Key = tuple[str, str]


class FairQueue:
    """The jobs that wait, and the number of those that are on the queue, by model.

    ``window`` returns the number of jobs of a model that may be on the queue and not yet begun. At
    most ``max_waiting`` jobs wait here; some of the places are not for the same caller. Further
    jobs wait while the estimated wait is shorter than ``max_wait`` seconds.
    """

    def __init__(
        self,
        window: Callable[[str], int],
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
        max_wait: float = 0.0,
    ) -> None:
        self._max_wait = max_wait
        # The seconds from the begin of a job to that of the next one, while jobs wait
        self._pace, self._last_begin = Pace(), clock()
        self._window, self._max_waiting, self._clock = window, max_waiting, clock
        # since when each job that no worker has begun is here; the first is the oldest
        self._since: dict[str, dict[object, float]] = {priority: {} for priority in PRIORITIES}
        # by priority and model, then by caller
        self._waiting: dict[_Key, OrderedDict[str, deque[_Turn]]] = {}
        self.queued = Counter[str]()

    @property
    def waiting(self) -> int:
        """The number of jobs that wait here."""
        return sum(len(line) for lines in self._waiting.values() for line in lines.values())

    @property
    def share(self) -> int:
        """The number of jobs of one caller that may wait here."""
        return compute_share(self._max_waiting)

    def compute_age(self, priority: str) -> float:
        """Return the seconds that the oldest job has waited for a worker, here and queued."""
        return self._clock() - next(iter(self._since[priority].values()), self._clock())

    @contextlib.asynccontextmanager
    async def turn(
        self, caller: str, priority: str, model: str
    ) -> AsyncIterator[Callable[[], None]]:
        """Wait for the turn of a job; yield a function to call when a worker has begun it.

        Raises BusyError: too many jobs wait.
        """
        since, mark = self._since[priority], object()
        if not any(self._since.values()):
            self._last_begin = self._clock()
        since[mark] = self._clock()
        try:
            await self._wait((priority, model), caller)
        except (asyncio.CancelledError, BusyError):
            del since[mark]
            raise
        is_over = False

        def leave() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                del since[mark]
                self._leave_queue(model)

        def begin() -> None:
            if not is_over:
                timestamp = self._clock()
                self._pace.observe(timestamp - self._last_begin)
                self._last_begin = timestamp
            leave()

        try:
            yield begin
        finally:
            leave()

    async def _wait(self, key: _Key, caller: str) -> None:
        turn: _Turn = asyncio.get_running_loop().create_future()
        lines = self._waiting.setdefault(key, OrderedDict())
        lines.setdefault(caller, deque()).append(turn)
        self._advance(key[1])
        try:
            if not turn.done():
                self._check(caller)
            await turn
        except (asyncio.CancelledError, BusyError):
            # Its turn had come.
            if turn.done() and not turn.cancelled():
                self._leave_queue(key[1])
            else:
                self._remove(key, caller, turn)
            raise

    def _check(self, caller: str) -> None:
        """Raise BusyError if too many jobs wait, of all callers or of this one."""
        waiting, wait = self.waiting - 1, self.estimate_wait()
        retry = compute_retry(wait, self._max_wait)
        if waiting >= self._max_waiting and not self._may_wait(wait):
            raise BusyError(waiting, retry, wait)
        count = sum(len(lines.get(caller, ())) for lines in self._waiting.values()) - 1
        if count >= self.share and not self._may_wait(wait, _CALLER_SHARE):
            raise CallerBusyError(count, retry, wait)

    def estimate_wait(self) -> float | None:
        """Return the seconds until a job that came last begins; None if they are unknown."""
        if self._pace.seconds is None:
            return None
        waiting = sum(map(len, self._since.values())) - 1
        # Workers may have become slower, or have left
        return waiting * max(self._pace.seconds, self._clock() - self._last_begin)

    def _may_wait(self, wait: float | None, share: float = 1.0) -> bool:
        most = max(MAX_WAITING, _MOST * self._max_waiting)
        return wait is not None and wait < share * self._max_wait and self.waiting <= most

    def _remove(self, key: _Key, caller: str, turn: _Turn) -> None:
        lines = self._waiting.get(key, OrderedDict[str, deque[_Turn]]())
        if turn in lines.get(caller, ()):
            lines[caller].remove(turn)
            if not lines[caller]:
                del lines[caller]
            if not lines:
                del self._waiting[key]

    def _leave_queue(self, model: str) -> None:
        self.queued[model] -= 1
        if not self.queued[model]:
            del self.queued[model]
        self._advance(model)

    def look(self) -> None:
        """Let jobs of all models advance: workers may have joined."""
        for model in {model for _, model in self._waiting}:
            self._advance(model)

    def _advance(self, model: str) -> None:
        """Give as many jobs their turn as the window allows: of each caller one, then again."""
        for priority in PRIORITIES:
            lines = self._waiting.get((priority, model))
            while lines and self.queued[model] < self._window(model):
                caller, line = next(iter(lines.items()))
                turn = line[0]
                lines.move_to_end(caller)
                self._remove((priority, model), caller, turn)
                if not turn.done():
                    self.queued[model] += 1
                    turn.set_result(None)

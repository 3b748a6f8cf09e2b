"""The line of a gateway: jobs wait here before they are put on the queue, fairly by caller.

The queue in NATS is served in order. So that a caller with a thousand jobs does not let all others
wait, a gateway puts only as many jobs there as the workers will soon begin; the others wait here,
and each caller has its turn. Interactive jobs come before those of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable

from clowder_aimage.engine.admission import BusyError
from clowder_aimage.fleet.fleet_name import PRIORITIES

_Turn = asyncio.Future[None]


class FairLine:
    """The jobs that wait, and the number of those that are on the queue.

    ``window`` returns how many jobs may be on the queue and not yet begun. ``most`` jobs wait here
    at most.
    """

    def __init__(
        self, window: Callable[[], int], most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._window, self._most, self._clock = window, most, clock
        # since when each job that no worker has begun is here; the first is the oldest
        self._since: dict[str, dict[object, float]] = {priority: {} for priority in PRIORITIES}
        self._waiting: dict[str, OrderedDict[str, deque[_Turn]]] = {
            priority: OrderedDict() for priority in PRIORITIES
        }
        self.queued = 0

    @property
    def waiting(self) -> int:
        """The number of jobs that wait here."""
        return sum(len(line) for lines in self._waiting.values() for line in lines.values())

    def age(self, priority: str) -> float:
        """Return for how many seconds the oldest job has waited for a worker, here and queued."""
        return self._clock() - next(iter(self._since[priority].values()), self._clock())

    @contextlib.asynccontextmanager
    async def turn(self, caller: str, priority: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for the turn of a job; yield a function to call when a worker has begun it.

        Raises BusyError: too many jobs wait.
        """
        if self.waiting >= self._most:
            raise BusyError(self.waiting, 5)
        since, mark = self._since[priority], object()
        since[mark] = self._clock()
        try:
            if self.queued < self._window() and not self.waiting:
                self.queued += 1
            else:
                await self._wait(caller, priority)
        except asyncio.CancelledError:
            del since[mark]
            raise
        is_over = False

        def begun() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                del since[mark]
                self.queued -= 1
                self.look()

        try:
            yield begun
        finally:
            begun()

    async def _wait(self, caller: str, priority: str) -> None:
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._waiting[priority].setdefault(caller, deque()).append(turn)
        self.look()  # the window may have grown
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.queued -= 1  # its turn had come
                self.look()
            else:
                self._leave(caller, priority, turn)
            raise

    def _leave(self, caller: str, priority: str, turn: _Turn) -> None:
        line = self._waiting[priority].get(caller)
        if line is not None:
            with contextlib.suppress(ValueError):
                line.remove(turn)
            if not line:
                del self._waiting[priority][caller]

    def look(self) -> None:
        """Give as many jobs their turn as the window allows: of each caller one, then again."""
        for lines in self._waiting.values():
            while lines and self.queued < self._window():
                caller, line = next(iter(lines.items()))
                turn = line.popleft()
                lines.move_to_end(caller)
                if not line:
                    del lines[caller]
                if not turn.done():
                    self.queued += 1
                    turn.set_result(None)

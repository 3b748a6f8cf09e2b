"""Simulated time for simulate.py: processes that wait for each other, and network links."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from typing import Any

MIB = 1024 * 1024
PIECE = MIB  # coarser than in wire.py, and as fair
AHEAD = 2  # pieces of a connection in flight

Process = Generator[Any, Any, Any]


class Event:
    """An event that processes can wait for."""

    __slots__ = ("is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Callable[[bool], None]] = []


class Clock:
    """Simulated time and the events scheduled in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, what))

    def run(self) -> None:
        queue = self._queue
        while queue:
            self.now, _, what = heapq.heappop(queue)
            what()

    def start(self, process: Process) -> Event:
        """Start a process; it yields seconds to sleep, an event, or one with a time limit."""
        ended = Event()
        self._step(process, None, ended)
        return ended

    def fire(self, event: Event) -> None:
        event.is_set = True
        waiting, event.waiting = event.waiting, []
        for each in waiting:
            each(True)

    def _step(self, process: Process, value: Any, ended: Event) -> None:
        while True:
            try:
                wanted = process.send(value)
            except StopIteration:
                self.fire(ended)
                return
            if isinstance(wanted, float):
                self.at(self.now + wanted, lambda: self._step(process, None, ended))
                return
            event, limit = wanted if isinstance(wanted, tuple) else (wanted, math.inf)
            if not event.is_set:
                self._wait(process, event, limit, ended)
                return
            value = True

    def _wait(self, process: Process, event: Event, limit: float, ended: Event) -> None:
        is_over = False

        def go_on(came: bool) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._step(process, came, ended)

        event.waiting.append(go_on)
        if limit < math.inf:
            self.at(self.now + limit, lambda: go_on(False))


class Wire:
    """One direction of a machine's network link."""

    __slots__ = ("free", "passed", "rate")

    def __init__(self, rate: float) -> None:
        self.rate, self.free, self.passed = rate, 0.0, 0

    def take(self, count: int, now: float) -> float:
        """Return the time at which this many bytes will have passed."""
        self.passed += count
        self.free = max(self.free, now) + count / self.rate
        return self.free


class Transfer:
    """A transfer between two machines, piece by piece over both links; ``ended`` is its event.

    With a ``source``, a transfer to the sender, it sends only what has arrived there.
    """

    __slots__ = (
        "_clock", "_down", "_left", "_open", "_readers", "_size", "_source", "_under_way", "_up",
        "came", "ended",
    )  # fmt: skip

    def __init__(
        self, clock: Clock, up: Wire, down: Wire, size: int, source: Transfer | None = None
    ) -> None:
        self._clock, self._up, self._down, self._left = clock, up, down, size
        self._size, self._source, self._under_way, self._open = size, source, 0, True
        self._readers: list[Transfer] = []
        self.came, self.ended = 0, Event()
        if source is not None:
            source._readers.append(self)
        self._send()

    def _send(self) -> None:
        if not self._left or not self._open or self._under_way >= AHEAD:
            return
        count = min(PIECE, self._left)
        if self._source and self._size - self._left + count > self._source.came:
            return
        self._left -= count
        self._under_way += 1
        self._open = False
        clock = self._clock

        def came() -> None:
            self._under_way -= 1
            self.came += count
            if not self._left and not self._under_way:
                clock.fire(self.ended)
            else:
                self._send()
            for each in self._readers:
                each._send()

        def passed() -> None:
            self._open = True
            clock.at(self._down.take(count, clock.now), came)
            self._send()

        clock.at(self._up.take(count, clock.now), passed)

"""A watch over the event loop: log work that blocks it for too long."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from clowder_aimage.http.log import name_method

# Seconds of CPU time between two points at which other tasks run
BLOCKED = 0.05
# Seconds after which the CPU time of the thread is read again. That is a call of the system, unlike
# reading the clock.
_STALE = 0.005
_T = TypeVar("_T")

_log = logging.getLogger("aimage.loop")


class _Reading(threading.local):
    """When the CPU time of a thread was read last, and the seconds that it had used."""

    last = (-math.inf, 0.0)


_reading = _Reading()


class WatchedCoroutine(Coroutine[Any, Any, _T]):
    """A coroutine whose steps are measured.

    The time is that of this thread, so a busy machine makes no difference.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, _T], work: str) -> None:
        self._coroutine, self._work = coroutine, work
        self.__name__ = self.__qualname__ = work

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, _T]:
        step: Callable[[Any], Any] = self.send
        sent: Any = None
        while True:
            try:
                waits_for = step(sent)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                step, sent = self.send, (yield waits_for)
            except GeneratorExit:
                self.close()
                raise
            except BaseException as error:
                step, sent = self.throw, error

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        last = _reading.last
        if began - last[0] > _STALE:
            last = _reading.last = began, time.thread_time()
        try:
            return step(*arguments)
        finally:
            if time.perf_counter() - began > BLOCKED:
                self._report(began, *last)

    def _report(self, began: float, read: float, used: float) -> None:
        """Log a step that took long, unless it did not compute."""
        # Other work of this thread since the reading took at most all the time until the step
        seconds = time.thread_time() - used - (began - read)
        if seconds > BLOCKED:
            facts = {"work": self._work, "seconds": round(seconds, 3), "limit": BLOCKED}
            _log.warning("the event loop was blocked", extra=facts)


@web.middleware
async def watch_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Measure the steps of each request."""
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    return await WatchedCoroutine(
        _handle(handler, request), f"{name_method(request.method)} {route}"
    )


async def _handle(handler: Handler, request: web.Request) -> web.StreamResponse:
    return await handler(request)

"""Threads for the work of a model: calls wait for it, or await it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

from clowder_aimage.content.telemetry import bind_context
from clowder_aimage.errors import AImageError

T = TypeVar("T")
IsCancelled = Callable[[], bool]
Work = Callable[[IsCancelled], T]


class WorkThreads:
    """Threads that do the work of calls, in order; each ends with this object.

    Work checks a function, ``is_cancelled``, between steps. Nobody waits for cancelled work.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._threads = threads = set[int]()
        self._executor = ThreadPoolExecutor(count, name, lambda: threads.add(threading.get_ident()))

    def run(self, work: Work[T]) -> T:
        """Return the result of work, or raise its error. An interrupt cancels it."""
        # A callback of work may use the model again.
        if threading.get_ident() in self._threads:
            return work(lambda: False)
        cancelled = threading.Event()
        future = self._submit(work, cancelled)
        try:
            return future.result()
        except BaseException:
            cancelled.set()
            future.cancel()
            raise

    async def arun(self, work: Work[T]) -> T:
        """Await the result of work, or raise its error. Cancelling the task cancels it."""
        cancelled = threading.Event()
        try:
            return await asyncio.wrap_future(self._submit(work, cancelled))
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def close(self, *, wait: bool = True) -> None:
        """End the threads, after work that has begun; ``wait`` for it."""
        # The last work may close the model.
        is_own = threading.get_ident() in self._threads
        self._executor.shutdown(wait=wait and not is_own)

    def _submit(self, work: Work[T], cancelled: threading.Event) -> Future[T]:
        try:
            return self._executor.submit(bind_context(lambda: work(cancelled.is_set)))
        except RuntimeError:
            raise AImageError("the model is closed", hint="load it again") from None


def check_cancelled(is_cancelled: IsCancelled) -> None:
    """Raise CancelledError if work is cancelled."""
    if is_cancelled():
        raise CancelledError

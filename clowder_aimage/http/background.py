"""Background work: coroutines on the event loop and calls in threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from clowder_aimage.engine.executor import LOCK_TIMEOUT
from clowder_aimage.engine.shared_transfer import run_in_thread
from clowder_aimage.http.loop_watch import WatchedCoroutine
from clowder_aimage.layout.lock import PATIENCE

# Seconds before a task is cancelled again: ample for a task to end
AGAIN = 5.0
_T = TypeVar("_T")
_log = logging.getLogger("aimage.http")


@contextlib.asynccontextmanager
async def run_in_background(*coroutines: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run coroutines in the background; cancel them on exit. A failure is logged."""
    tasks = [asyncio.create_task(_watch(coroutine)) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        await end_tasks(*tasks)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they end.

    In Python 3.11 a race loses the cancellation if the awaited future of ``wait_for`` ends at the
    same time, so it is repeated.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN)


def _watch(coroutine: Coroutine[Any, Any, object]) -> WatchedCoroutine[object]:
    return WatchedCoroutine(coroutine, getattr(coroutine, "__qualname__", "background"))


def _log_failure(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        work = getattr(task.get_coro(), "__qualname__", task.get_name())
        _log.error("background task failed", extra={"work": work}, exc_info=error)


async def run_in_daemon_thread(call: Callable[[], _T]) -> _T:
    """Return the result of ``call()``, run in a daemon thread with a short wait for locks.

    The event loop's executor has few threads, and the process does not exit before they end. An
    unresponsive upstream must block neither disk access nor the exit.
    """
    done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

    def call_with_patience() -> _T:
        PATIENCE.set(LOCK_TIMEOUT)
        return call()

    run_in_thread(call_with_patience, done, "aimage-upstream")
    return await done

"""What a server does beside its requests, and how it comes to its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import structlog

from clowder_aimage.engine.engine import Engine

_log = structlog.get_logger("aimage.worker")


class Signals:
    """The first wish to end, and the second; and the wish to read again what can be."""

    def __init__(self) -> None:
        self.first, self.second, self.reload = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def watch(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.hear)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def hear(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def drain(engine: Engine, grace: float, now: asyncio.Event) -> None:
    """Take nothing more; let what runs end within ``grace`` seconds, or until ``now``."""
    closing = asyncio.create_task(engine.close(grace))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not closing.done():
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await engine.close(0)
        return
    closing.result()


@contextlib.asynccontextmanager
async def beside(*works: object) -> AsyncIterator[None]:
    """Have coroutines run meanwhile. One that fails is logged: nobody else would ever know."""
    tasks = [asyncio.ensure_future(work) for work in works]  # type: ignore[call-overload]
    for task in tasks:
        task.add_done_callback(_mourn)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _mourn(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        work = getattr(task.get_coro(), "__qualname__", task.get_name())
        _log.error("what runs beside the requests has failed", work=work, exc_info=error)

"""Run calls in several threads; the first failure stops all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from clowder_aimage.content.telemetry import bind_context
from clowder_aimage.errors import AImageError

if TYPE_CHECKING:
    from concurrent.futures import Future

# Seconds that running calls get to end after a failure
_GRACE = 1.0


class ParallelStoppedError(AImageError):
    """The end of a call after another one failed, or after an interrupt."""

    def __init__(self) -> None:
        super().__init__("stopped")


def run_parallel(
    calls: Sequence[Callable[[], None]], threads: int, stop: Callable[[], None]
) -> None:
    """Run ``calls``, ``threads`` at a time.

    If a call raises, or on an interrupt, ``stop`` is called, the other calls get a short time to
    end, and the first error is raised. A thread that still waits for the network keeps running.
    """
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            # The first is the cause: others fail because they are stopped
            errors.append(error)
            stop()
            raise

    pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="aimage")
    futures: list[Future[None]] = []
    try:
        futures += [pool.submit(run, bind_context(call)) for call in calls]
        wait(futures, return_when=FIRST_EXCEPTION)
        if errors:
            raise errors[0]
    except BaseException:
        stop()
        pool.shutdown(wait=False, cancel_futures=True)
        wait([future for future in futures if not future.cancelled()], timeout=_GRACE)
        raise
    pool.shutdown()

"""Several threads at one job, the first failure ending it for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from clowder_aimage.errors import AImageError

_PARTING = 1.0  # seconds that calls under way get to clean up in when one has failed


class ParallelStoppedError(AImageError):
    """Another call failed, or the user left: this one stops where it can."""

    def __init__(self) -> None:
        super().__init__("stopped")


def in_parallel(
    calls: Sequence[Callable[[], None]], threads: int, stop: Callable[[], None]
) -> None:
    """Make ``calls``, ``threads`` at a time.

    When one raises, or the user interrupts, ``stop`` is called, the others get a moment to end,
    and the first error is raised. A thread that waits for a dead network is left behind.
    """
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)  # the first: what others raise once they are stopped is no news
            stop()
            raise

    pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="aimage")
    futures: list[Future[None]] = []
    try:
        futures += [pool.submit(run, call) for call in calls]
        wait(futures, return_when=FIRST_EXCEPTION)
        if errors:
            raise errors[0]
    except BaseException:
        stop()
        pool.shutdown(wait=False, cancel_futures=True)
        wait([future for future in futures if not future.cancelled()], timeout=_PARTING)
        raise
    pool.shutdown()

"""Pictures to the worker: encoded and sent by a thread while the next ones are computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

# Pictures that wait for the thread; further ones wait for a place, which bounds the memory
MAX_WAITING = 4


@dataclass(frozen=True, slots=True)
class _Job:
    """A part of the answer to a request; the last one is its end."""

    request: int
    work: Callable[[], None]
    is_last: bool


class PictureSender:
    """The thread that encodes and sends what a model has computed, in order.

    ``report`` is the context that reports the error of a request; the other parts of its answer
    are left out then.
    """

    def __init__(self, report: Callable[[int], AbstractContextManager[None]]) -> None:
        self._report = report
        self._jobs: queue.Queue[_Job] = queue.Queue(MAX_WAITING)
        self._failed: set[int] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, request: int, work: Callable[[], None], *, is_last: bool = False) -> None:
        """Do ``work`` after what was put before; wait for a place if too much is waiting."""
        self._jobs.put(_Job(request, work, is_last))

    def has_failed(self, request: int) -> bool:
        """Return True if the error of a request was reported."""
        return request in self._failed

    def wait(self, request: int) -> None:
        """Wait until all that was put is sent; ``request`` has ended otherwise."""
        self._jobs.join()
        self._failed.discard(request)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                # The worker has exited: the rest is left out, and the model is not kept waiting
                with suppress(BrokenPipeError):
                    self._do(job)
            finally:
                if job.is_last:
                    self._failed.discard(job.request)
                self._jobs.task_done()

    def _do(self, job: _Job) -> None:
        if job.request in self._failed:
            return
        is_done = False
        with self._report(job.request):
            job.work()
            is_done = True
        if not is_done:
            self._failed.add(job.request)

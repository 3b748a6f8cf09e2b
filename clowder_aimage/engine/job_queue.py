"""The jobs of a worker: conversions of AImages, and fusions of adapters.

They run one after another, each in its own process. The latest jobs are kept in memory only: a
worker that exits loses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from clowder_aimage.engine import frame
from clowder_aimage.engine.admission import BusyError, shutdown_error
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.runner import log_lines, parse_error, start_process
from clowder_aimage.errors import AImageError, ModelError, NoMemoryError
from clowder_aimage.oci import Reference

CONVERT, FUSE = "convert", "fuse"
Status = Literal["queued", "running", "done", "failed", "cancelled"]
QUEUED: Final = "queued"
RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
# Limit of queued and running jobs
MAX_WAITING = 8
# Ended jobs that clients can still list
MAX_ENDED = 50
# Seconds after which a refused job may be requested again
_WAIT = 60
_COMMAND = (sys.executable, "-m", "clowder_aimage.engine.job_process")


@dataclass(slots=True, eq=False)
class Job:
    """A job: it makes ``target`` from ``model``, by the options in ``command``.

    ``completed`` of ``total`` bytes of the ``stage`` are done. ``result`` has the ``digest`` and
    the ``size`` of the new AImage, the bytes that are ``new`` in the store, and a ``remark``. Times
    are seconds since the epoch.
    """

    id: str
    kind: str
    model: Reference
    target: Reference
    command: frame.Message
    created: float
    status: Status = QUEUED
    stage: str = ""
    completed: int = 0
    total: int = 0
    started: float | None = None
    ended: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    error: AImageError | None = None

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    def record(self, message: frame.Message) -> None:
        """Record a report of the process."""
        facts = {key: value for key, value in message.items() if key != "is"}
        if message["is"] == "progress":
            self.stage, self.completed = facts["stage"], facts["completed"]
            self.total = facts["total"]
        elif message["is"] == "error":
            self.status, self.error = FAILED, parse_error(message)
        else:
            self.status, self.result, self.completed = DONE, facts, self.total

    def record_end(self, code: int | None) -> None:
        """Record the end of the process with the exit code ``code``."""
        if self.status != RUNNING:
            return
        self.status = FAILED
        if code is not None and code < 0:
            message = f"the process of the job was killed by signal {-code}"
            hint = "unload models to make room in memory, then try again"
            self.error = NoMemoryError(message, hint=hint)
        else:
            self.error = ModelError(f"the process of the job ended with exit code {code}")


class JobQueue:
    """The jobs of a worker with the stores ``roots``, on one event loop."""

    def __init__(
        self,
        roots: Sequence[Path],
        events: EventLog,
        *,
        lora_dir: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store_options = {
            "roots": [str(root) for root in roots],
            "lora_dir": None if lora_dir is None else str(lora_dir),
        }
        self._events, self._clock = events, clock
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._is_closed = False

    def list_jobs(self) -> list[Job]:
        """Return the known jobs, the latest first."""
        return list(reversed(self._jobs.values()))

    def get(self, number: str) -> Job | None:
        """Return the job with an id, or None."""
        return self._jobs.get(number)

    def is_target(self, name: Reference) -> bool:
        """Return True if a queued or running job makes an AImage with this name."""
        return any(job.target == name and not job.is_over for job in self._jobs.values())

    def add(self, kind: str, model: Reference, target: Reference, options: frame.Message) -> Job:
        """Queue a job. Raises BusyError if too many wait; StoppedError at the worker's end."""
        if self._is_closed:
            raise shutdown_error()
        if len(self._tasks) >= MAX_WAITING:
            raise BusyError(len(self._tasks), _WAIT)
        names = {"kind": kind, "model": str(model), "target": str(target)}
        command = {**names, **self._store_options, **options}
        job = Job(secrets.token_hex(8), kind, model, target, command, self._clock())
        self._jobs[job.id] = job
        ended = [old for old in self._jobs.values() if old.is_over]
        for oldest in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._jobs[oldest.id]
        task = self._tasks[job.id] = asyncio.create_task(self._run(job))
        task.add_done_callback(lambda _: self._finish(job))
        return job

    async def cancel(self, job: Job) -> None:
        """End a job and wait for the end of its process; forget a job that is over."""
        if (task := self._tasks.get(job.id)) is None:
            self._jobs.pop(job.id, None)
            return
        task.cancel()
        await asyncio.wait([task])

    async def close(self) -> None:
        """Refuse new jobs and end the others."""
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, job: Job) -> None:
        async with self._turn:
            job.status, job.started = RUNNING, self._clock()
            try:
                process = await start_process(_COMMAND)
            except OSError as error:
                job.status = FAILED
                job.error = ModelError(f"cannot start a process: {error.strerror or error}")
                return
            lines = asyncio.create_task(log_lines(process))
            try:
                await self._follow(job, process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                await lines
            job.record_end(process.returncode)

    async def _follow(self, job: Job, process: asyncio.subprocess.Process) -> None:
        """Send the command, and record the reports of the process until it ends."""
        assert process.stdin is not None and process.stdout is not None  # noqa: S101 - pipes
        with contextlib.suppress(ConnectionError):
            process.stdin.write(frame.encode(job.command))
            await process.stdin.drain()
        while (received := await frame.receive(process.stdout)) is not None:
            job.record(received[0])
        await process.wait()

    def _finish(self, job: Job) -> None:
        task = self._tasks.pop(job.id)
        if task.cancelled() and job.status in (QUEUED, RUNNING):
            job.status = CANCELLED
        elif not task.cancelled() and (error := task.exception()) is not None:
            job.status, job.error = FAILED, ModelError(f"the job failed: {type(error).__name__}")
        job.ended = self._clock()
        facts = {"job": job.id, "change": job.kind, "model": str(job.model)}
        reason = {"reason": job.error.message} if job.error is not None else {}
        self._events.record("job", **facts, target=str(job.target), outcome=job.status, **reason)

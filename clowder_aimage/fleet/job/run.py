"""One attempt of a worker to serve a job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from nats.aio.msg import Msg

from clowder_aimage.api.ollama.routes import copy_name
from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.frame import DEAD, END, FAILED, RELEASED, Attempt
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.log import JobLog, SupersededError
from clowder_aimage.fleet.job.mark import MarkChain, read_chain
from clowder_aimage.fleet.job.request import request_of
from clowder_aimage.fleet.link import LOST, FleetLink
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import WorkerRegistry
from clowder_aimage.http.api_error import NO_RETRY
from clowder_aimage.http.background import end_tasks
from clowder_aimage.http.local_call import LocalCalls, get_body
from clowder_aimage.http.route import ADMIN
from clowder_aimage.oci import Digest, Reference

# Seconds after the last sign of life of its worker that a job goes elsewhere.
ACK_WAIT = 4.0
# Seconds between two signs of life.
ALIVE = ACK_WAIT / 4
# Failed attempts before a job is given up.
ATTEMPTS = 4
# Seconds before a job that a worker gave back is delivered again.
LATER = 0.5
# Seconds in which a worker reports that it has begun a job.
REPORTED = 0.5
# Failures that may not occur on another worker.
_RETRIED = (500, 502, 503, 507)
_BUSY = 503
DONE, GIVEN_BACK, GIVEN_UP, CANCELLED = "done", "given back", "given up", "cancelled"
_log = logging.getLogger("aimage.fleet")


class _FailedAttemptError(AImageError):
    """The worker could not serve a job; ``is_fault`` unless it had no room."""

    def __init__(self, reason: str, *, is_fault: bool) -> None:
        super().__init__(reason)
        self.is_fault = is_fault


@dataclass(slots=True)
class JobRun:
    """Serves a job, whose message is ``message``, with the worker of this process."""

    link: FleetLink
    calls: LocalCalls
    service: Service
    worker: str
    workers: WorkerRegistry
    message: Msg
    job: FleetJob
    ticket: JobTicket
    is_cancelled: bool = False
    # This worker's store has no such name.
    is_unnamed: bool = False
    task: asyncio.Task[str] | None = None

    async def cancel(self) -> None:
        """End the job, as its client has gone."""
        self.is_cancelled = True
        if self.task is not None:
            await end_tasks(self.task)

    async def serve(self) -> str:
        """Serve the job unless it was served before; return the outcome."""
        async with extend_deadline(self.message):
            self.task = asyncio.create_task(self._serve())
            if self.is_cancelled:
                self.task.cancel()
            try:
                await asyncio.wait([self.task])
            except asyncio.CancelledError:
                await end_tasks(self.task)
                raise
            if not self.task.cancelled():
                return self.task.result()
            if not self.is_cancelled:
                return GIVEN_BACK
            await self._terminate()
            return CANCELLED

    async def _serve(self) -> str:
        try:
            chain = await read_chain(self.link, self.ticket)
        except LOST:
            return await self._give_back()
        if chain.is_over:
            await self._acknowledge()
            return DONE
        if await self._is_served_elsewhere(chain):
            # Without an acknowledgement of that worker it is delivered again.
            return GIVEN_BACK
        attempt = Attempt.following(chain.last)
        if self.worker in attempt.past and self._has_others(attempt.past):
            return await self._give_back()
        log = JobLog(self.link, self.worker, attempt, self.ticket)
        try:
            await log.begin()
            return await self._attempt(log)
        except SupersededError:
            # Another worker serves the job: this attempt does not count.
            return GIVEN_BACK
        except asyncio.CancelledError:
            if not self.is_cancelled:
                await self._release(log, RELEASED, "the worker is shutting down")
            raise

    async def _attempt(self, log: JobLog) -> str:
        if len(log.attempt.past) >= ATTEMPTS:
            return await self._give_up(log, "the workers stopped answering, or failed")
        is_last = len(log.attempt.past) + 1 >= ATTEMPTS
        try:
            async with asyncio.timeout(self.job.timeout):
                reason = await self._relay(log, is_last=is_last)
        except TimeoutError:
            facts = {
                "status": 504,
                "code": "deadline_exceeded",
                "message": "the deadline has passed",
            }
            await log.end(DEAD, facts)
            await self._acknowledge()
            return GIVEN_UP
        except _FailedAttemptError as error:
            is_fault, reason = error.is_fault, error.message
            if is_fault and is_last:
                return await self._give_up(log, reason)
            _log.warning(
                "a job goes to another worker", extra={"job": self.job.id, "reason": reason}
            )
            await self._release(log, FAILED if is_fault else RELEASED, reason)
            return GIVEN_BACK
        # The client gets the response of the last worker.
        if reason:
            return await self._give_up(log, reason, END)
        await self._name()
        await log.end(END)
        await self._acknowledge()
        return DONE

    async def _relay(self, log: JobLog, *, is_last: bool) -> str:
        """Pass the response of the worker on; return why the last attempt failed, or "".

        Raises _FailedAttemptError.
        """
        stream = _LoggedResponse(log, self.job.model)
        try:
            response = await self.calls.send(request_of(await run_io(self._pin), stream))
        except ConnectionError as error:
            raise _FailedAttemptError(str(error), is_fault=True) from None
        if stream.has_begun:
            return ""
        status, body, reason = response.status, get_body(response), ""
        name, text = NO_RETRY
        if status in _RETRIED and response.headers.get(name) != text:
            reason = f"{status}: {body[:500].decode('utf-8', 'replace')}"
            if status == _BUSY or not is_last:
                raise _FailedAttemptError(reason, is_fault=status != _BUSY)
        await stream.begin(response)
        await stream.write(body)
        return reason

    def _pin(self) -> FleetJob:
        """Return the job with the admitted manifest as its model. Blocks.

        It is unchanged if its name has that digest here, as it nearly always has.
        """
        job, is_named = self.job, False
        # The default model has another name than the requested one.
        for name in (job.asked, job.model):
            with contextlib.suppress(AImageError):
                reference = self.service.resolve_reference(name or None)
                if str(self.service.store.resolve(reference).digest) == job.digest:
                    return job if name == job.asked else job.with_model(name)
                # The name exists here, with another digest.
                is_named = True
        self.is_unnamed = not is_named
        return job.with_model(str(self._build_reference()))

    def _build_reference(self) -> Reference:
        return replace(Reference.parse(self.job.model), digest=Digest.parse(self.job.digest))

    async def _name(self) -> None:
        """Give a model that was pulled by its digest the name that its client used."""
        may_pull = (self.job.fields or {}).get("pull") != NEVER and self.job.scope == ADMIN
        name = Reference.parse(self.job.model)
        if self.is_unnamed and may_pull and name.registry is not None and name.digest is None:
            with contextlib.suppress(AImageError):
                source = self._build_reference()
                await run_locking(copy_name, self.service.store, source, name)

    async def _is_served_elsewhere(self, chain: MarkChain) -> bool:
        """Return True if another worker is serving the job, and says so.

        A third one may have sent its message back to the queue.
        """
        begin = chain.begin
        if begin is None or not chain.is_running or begin.worker == self.worker:
            return False
        if not self.workers.has_fresh(begin.worker):
            return False
        # It may have begun just now.
        await asyncio.sleep(REPORTED)
        return self.workers.is_serving(begin.worker, self.job.id)

    def _has_others(self, past: tuple[str, ...]) -> bool:
        return self.workers.on_disk_elsewhere(self.job.digest, self.worker, *past)

    # -- the end of an attempt

    async def _acknowledge(self) -> None:
        with contextlib.suppress(*LOST):
            await self.message.ack()

    async def _terminate(self) -> None:
        with contextlib.suppress(*LOST):
            await self.message.term()

    async def _give_back(self) -> str:
        with contextlib.suppress(*LOST):
            await self.message.nak(delay=LATER)
        return GIVEN_BACK

    async def _release(self, log: JobLog, kind: str, reason: str) -> None:
        """Let another worker have the job; at a shutdown at once."""
        try:
            async with asyncio.timeout(ACK_WAIT / 2):
                await log.end(kind, {"reason": reason})
        except SupersededError:
            # Another worker has the job.
            return
        except TimeoutError:
            pass
        with contextlib.suppress(*LOST):
            is_busy = kind == RELEASED and not self.service.engine.is_draining
            await self.message.nak(delay=LATER if is_busy or kind == FAILED else None)

    async def _give_up(self, log: JobLog, reason: str, kind: str = DEAD) -> str:
        """End a job that failed too often, with an entry in the stream of such jobs."""
        workers = ", ".join(dict.fromkeys((*log.attempt.past, self.worker)))
        message = f"the job was given up after {ATTEMPTS} attempts by {workers}: {reason}"
        facts: dict[str, Any] = {"status": 500, "code": "job_given_up", "message": message}
        await log.end(kind, facts if kind == DEAD else None)
        letter = {**facts, "job": self.job.id, "path": self.job.path, "model": self.job.model}
        letter["digest"] = self.job.digest
        with contextlib.suppress(AImageError):
            name = self.link.names.build_dead_letter_subject(self.worker, self.job.id)
            await self.link.store(name, json.dumps(letter).encode(), patience=2.0)
        _log.error("job given up", extra={"job": self.job.id, "reason": message})
        await self._acknowledge()
        return GIVEN_UP


class _LoggedResponse:
    """Writes a response to the log of an attempt; ``model`` is the name that the client used."""

    def __init__(self, log: JobLog, model: str) -> None:
        self._log, self._model = log, model
        self.has_begun = False

    async def begin(self, response: web.StreamResponse) -> None:
        self.has_begun = True
        # A pinned job names the model by its digest: the client sees the name that it used.
        replaced = {"X-Aimage-Model": self._model}
        headers = [(name, replaced.get(name, text)) for name, text in response.headers.items()]
        await self._log.write_head(response.status, headers)

    async def write(self, data: bytes) -> None:
        await self._log.write_data(data)


@contextlib.asynccontextmanager
async def extend_deadline(message: Msg) -> AsyncIterator[None]:
    """Extend the server's deadline for an acknowledgement, so that the job is not redelivered."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(ALIVE)
            with contextlib.suppress(*LOST):
                await message.in_progress()

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()

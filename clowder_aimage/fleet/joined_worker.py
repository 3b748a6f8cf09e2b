"""A worker that takes jobs of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nats.aio.msg import Msg
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError
from prometheus_client import Gauge

from clowder_aimage import __version__
from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import AImageError, FormatError, UsageError, VerificationError
from clowder_aimage.fleet.frame import DEAD, Attempt
from clowder_aimage.fleet.job import choice as job_choice
from clowder_aimage.fleet.job.choice import JobChoice, Key
from clowder_aimage.fleet.job.envelope import JOB, TICKET, JobEnvelope
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.log import JobLog
from clowder_aimage.fleet.job.mark import read_chain
from clowder_aimage.fleet.job.request import answer_call
from clowder_aimage.fleet.job.run import (
    DONE,
    GIVEN_BACK,
    GIVEN_UP,
    LATER,
    JobRun,
    extend_deadline,
)
from clowder_aimage.fleet.link import LOST, FleetLink
from clowder_aimage.fleet.name import GATEWAY, OPERATOR
from clowder_aimage.fleet.placement import Placement, SlotCounter
from clowder_aimage.fleet.recent_rate import RecentRate
from clowder_aimage.fleet.signature import SignedMessage
from clowder_aimage.fleet.store_view import StoreView
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import (
    MAX_MODELS,
    MAX_SLOTS,
    REPORT,
    WorkerStatus,
    WorkerWatch,
    parse_order,
)
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.local_call import LocalCalls
from clowder_aimage.http.route import Role

# Seconds between two checks for a change.
LOOK = 0.25
# Seconds between two looks for jobs whose announcement reached no worker.
SWEEP = 1.0
# Seconds between two refusals of messages that are logged, for each subject.
REFUSALS = 60.0
# Workers that try to read a job before it is given up.
READERS = 3
REMEMBERED = 1000  # cancelled jobs
# Greater than the number of any message.
_ALL = 1 << 62
_NEXT = json.dumps({"batch": 1, "no_wait": True}).encode()
_log = logging.getLogger("aimage.fleet")


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The unique id of a worker in its fleet, and the address of its API."""

    id: str
    address: str = ""


class JoinedWorker(Role):
    """Takes jobs while slots are free, and reports the status of this worker.

    ``calls`` are those of the interfaces that serve the jobs.
    """

    def __init__(
        self, link: FleetLink, service: Service, calls: LocalCalls, identity: WorkerIdentity
    ) -> None:
        self._link, self._service, self._identity = link, service, identity
        self._calls = calls
        self._watch = WorkerWatch(link)
        self._view = StoreView(service.store, service.descriptions)
        self._slots = SlotCounter(service.settings.max_models or 1, service.settings.parallel)
        self._placement = Placement(
            service, self._view, self._slots, self._watch.workers, identity.id
        )
        self._choice = JobChoice(self._placement.wait, self._placement.lacks_room)
        service.engine.set_eviction_cost(self._estimate_eviction_cost)
        self._wake = asyncio.Event()
        self._runs: dict[str, JobRun] = {}
        # a job may be cancelled while its message is on the way here
        self._cancelled: deque[str] = deque(maxlen=REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()
        # The time of the last refusal that was logged, by subject.
        self._refused: dict[str, float] = {}
        self._swept = self._reported = 0.0
        self._last_published: object = None
        self._rate = RecentRate()
        self.done = self.failed = 0
        self.takes_jobs = True
        service.fleet = self._link
        connected = Gauge(
            "aimage_fleet_connected",
            "Whether the fleet on NATS can be used.",
            registry=service.metrics.registry,
        )
        connected.set_function(lambda: self._link.is_ready)
        self._check_status()
        self._listen()

    def _check_status(self) -> None:
        """Raise UsageError if other programs would leave this worker out."""
        try:
            WorkerStatus.decode(self._build_status().encode(), self._identity.id)
        except FormatError as error:
            raise UsageError(f"a fleet does not accept this worker: {error.message}") from None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._link.on_ready.append(self._wake.set)
        async with (
            self._link.open(),
            run_in_background(
                self._watch.run(),
                _repeat(self._report, LOOK),
                _repeat(self._sweep, LOOK),
                _repeat(self._take, 0),
            ),
        ):
            try:
                yield
            finally:
                await self._end()

    async def drain(self, grace: float, hurry: asyncio.Event) -> None:
        """Take no more jobs; end running ones within ``grace``, and give the others back."""
        self.takes_jobs = False
        await self._publish_status()
        waiting = [asyncio.create_task(hurry.wait()), asyncio.create_task(self._wait_until_idle())]
        await asyncio.wait(waiting, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await self._end()

    async def _wait_until_idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _end(self) -> None:
        """Give back the jobs that are being served, and leave the fleet."""
        self.takes_jobs = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        with contextlib.suppress(*LOST, JetStreamError):
            if self._link.is_ready:
                bucket = await self._link.streams.key_value(self._link.names.workers)
                await bucket.delete(self._identity.id)

    def _estimate_eviction_cost(self, digest: object) -> float:
        """Return the eviction cost of a model in memory: highest with a job on the queue."""
        name = str(digest)
        is_wanted = self._choice.is_wanted(name.partition(":")[2])
        return self._placement.estimate_eviction_cost(name, is_wanted=is_wanted)

    # -- taking jobs

    async def _take(self) -> None:
        """Ask for a job once there may be one that this worker can serve."""
        key, soonest = self._choice.select_next(time.monotonic())
        if key is None or not self.takes_jobs or not self._link.is_ready:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(soonest if self.takes_jobs else None):
                    await self._wake.wait()
            return
        is_late = (self._placement.wait(key[1]) or 0.0) >= job_choice.ELSEWHERE
        if is_late and not await self._has_waited(key):
            return
        request_time = time.monotonic()
        message = await self._ask(key)
        if message is None:
            self._choice.forget(key, request_time)
            return
        self._choice.record_delivery(key, message.metadata.sequence.stream)
        digest = f"sha256:{key[1]}"
        is_new = digest not in {*self._placement.loaded, *self._slots.digests}
        self._slots.take(digest)
        self._begin(self._serve(message, key))
        # At once: other workers would load it too.
        if is_new:
            self._begin(self._publish_status())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _has_waited(self, key: Key) -> bool:
        """Return True if a job of a queue has waited long enough for this worker to load its model.

        The times are those of announcements; the server has the number of the last delivered job.
        Without this check, a request would take a job that came just now.
        """
        names = self._link.names
        try:
            info = await self._link.streams.consumer_info(
                names.jobs, names.build_consumer_name(*key)
            )
        except NotFoundError:
            # No worker has asked yet.
            return True
        except (*LOST, JetStreamError):
            self._choice.forget(key)
            return False
        is_empty = not info.num_pending
        number = info.delivered.stream_seq if info.delivered else 0
        self._choice.record_delivery(key, _ALL if is_empty else number)
        if is_empty and not info.num_ack_pending:
            self._choice.forget(key)
        return self._choice.is_due(key, time.monotonic())

    async def _ask(self, key: Key) -> Msg | None:
        """Return a job of a queue; None if it is empty or unreachable."""
        names = self._link.names
        consumer = names.build_consumer_name(*key)
        try:
            subject = f"{self._link.api}.CONSUMER.MSG.NEXT.{names.jobs}.{consumer}"
            message = await self._link.client.request(
                subject,
                _NEXT,
                timeout=2.0,
                old_style=True,
                # A new inbox for each request: the answer has the subject of the job.
            )
        except (*LOST, JetStreamError):
            # A gateway makes the consumer again if it was removed: NATS does not answer then.
            return None
        status = (message.headers or {}).get("Status")
        return message if status is None else None

    async def _serve(self, message: Msg, key: Key) -> None:
        start, digest = time.monotonic(), f"sha256:{key[1]}"
        try:
            workers = self._watch.workers
            envelope = JobEnvelope.verify(self._link, message)
            async with extend_deadline(message):
                job = await self._read_job(envelope, key)
            if job.id in self._runs:
                # Its acknowledgement counts for this message, too; without one it comes again.
                return
            run = JobRun(
                self._link,
                self._calls,
                self._service,
                self._identity.id,
                workers,
                message,
                job,
                envelope.ticket,
            )
            self._runs[job.id] = run
            run.is_cancelled = job.id in self._cancelled
            try:
                outcome = await run.serve()
            finally:
                # Else it was delivered again meanwhile.
                if self._runs.get(job.id) is run:
                    del self._runs[job.id]
            if outcome == DONE:
                self.done += 1
                self._rate.record()
            self.failed += outcome == GIVEN_UP
            if outcome == GIVEN_BACK and workers.on_disk_elsewhere(digest, self._identity.id):
                self._choice.leave(key, time.monotonic())
        except VerificationError as error:
            # It is not a job. Another worker may know the key set better; the last one removes it.
            _log.error("a job was refused", extra={"reason": error.message})
            with contextlib.suppress(*LOST):
                await self._return_unreadable(message)
        except FormatError as error:
            with contextlib.suppress(*LOST):
                await self._refuse(message, error)
        except LOST as error:
            _log.warning("a job was given back", extra={"reason": repr(error)})
        except Exception:
            _log.exception("a job was given back")
        finally:
            self._slots.leave(digest)
            self._placement.demand.record_end(digest, start)
            self._wake.set()

    async def _read_job(self, envelope: JobEnvelope, key: Key) -> FleetJob:
        """Return the job of a queue. Raises FormatError, VerificationError, LOST."""
        job = await envelope.read(self._link)
        if (job.priority, job.digest) != (key[0], f"sha256:{key[1]}"):
            raise VerificationError("the job is not that of its subject")
        if job.timeout is None:
            return job
        return replace(job, timeout=max(0.0, envelope.signed_at + job.timeout - self._link.now()))

    async def _return_unreadable(self, message: Msg) -> bool:
        """Give a message to other workers; the last of READERS removes it. Return True then."""
        if (message.metadata.num_delivered or 0) < READERS:
            await message.nak(delay=LATER)
            return False
        await message.term()
        return True

    async def _refuse(self, message: Msg, error: FormatError) -> None:
        """Give an unreadable job to other workers: they may be newer; the last one ends it."""
        _log.error("a job cannot be read", extra={"reason": error.message})
        if (message.metadata.num_delivered or 0) >= READERS:
            with contextlib.suppress(AImageError):
                await self._end_unreadable(message, error)
        await self._return_unreadable(message)

    async def _end_unreadable(self, message: Msg, error: FormatError) -> None:
        """End a job that no worker can read. Raises AImageError, LOST."""
        headers, link = message.headers or {}, self._link
        ticket = JobTicket.parse(headers.get(JOB, ""), headers.get(TICKET, ""))
        chain = await read_chain(link, ticket)
        if not chain.is_over:
            log = JobLog(link, self._identity.id, Attempt.following(chain.last), ticket)
            text = f"the job was given up, as no worker can read it: {error.message}"
            await log.begin()
            await log.end(DEAD, {"status": 500, "code": "job_given_up", "message": text})

    async def _sweep(self) -> None:
        """Look for jobs whose announcement reached no worker."""
        names = self._link.names
        if not self._link.is_ready:
            return
        timestamp = time.monotonic()
        if self.takes_jobs and timestamp >= self._swept:
            self._swept = timestamp + SWEEP * random.uniform(0.8, 1.2)  # noqa: S311
            info = await self._link.streams.stream_info(names.jobs, subjects_filter=">")
            for subject in info.state.subjects or {}:
                self._record(subject)

    def _record(self, subject: str, number: int = 0) -> None:
        key = self._link.names.parse_job_subject(subject)
        if key is not None:
            self._choice.record(key, time.monotonic(), number)
            self._wake.set()

    # -- messages of the fleet

    def _listen(self) -> None:
        names, worker = self._link.names, self._identity.id
        self._listen_to(names.announcements, GATEWAY, self._on_announcement)
        self._listen_to(names.build_cancel_subject("*"), GATEWAY, self._on_cancel)
        self._listen_to(names.build_call_subject(worker), GATEWAY, self._on_call)
        self._listen_to(names.build_control_subject(worker), OPERATOR, self._on_order)

    def _listen_to(
        self, subject: str, role: str, callback: Callable[[Msg], Awaitable[None]]
    ) -> None:
        """Call back with the messages of a subject that a role of the fleet has signed."""

        async def verify(message: Msg) -> None:
            try:
                # A message of another subject may be sent to a subscription by JetStream.
                if not message.subject.startswith(subject.removesuffix("*")):
                    raise VerificationError("it is a message of another subject")
                signed = SignedMessage(message.subject, message.headers or {}, message.data)
                self._link.verifier.check_once(signed, role)
            except VerificationError as error:
                self._log_refusal(subject, error)
            else:
                await callback(message)

        self._link.listen(subject, verify)

    def _log_refusal(self, subject: str, error: VerificationError) -> None:
        """Log that a message was refused; those of a subject that follow are not logged."""
        timestamp = time.monotonic()
        if timestamp - self._refused.get(subject, -REFUSALS) >= REFUSALS:
            self._refused[subject] = timestamp
            _log.warning(
                "a message was refused", extra={"subject": subject, "reason": error.message}
            )

    async def _on_announcement(self, message: Msg) -> None:
        subject, _, number = message.data.decode("ascii", "replace").partition(" ")
        self._record(subject, int(number) if number.isdecimal() else 0)
        if (key := self._link.names.parse_job_subject(subject)) is not None:
            self._placement.demand.record(f"sha256:{key[1]}")

    async def _on_cancel(self, message: Msg) -> None:
        job = message.subject.rpartition(".")[2]
        self._cancelled.append(job)
        if (run := self._runs.get(job)) is not None:
            self._begin(run.cancel())

    async def _on_call(self, message: Msg) -> None:
        """Serve a request that is for this worker alone."""
        self._begin(answer_call(self._link, self._calls, message, self._renew))

    async def _renew(self) -> bytes:
        """Report after a change of the store, and return the status. Raises AImageError."""
        await run_io(self._view.read)
        await self._publish_status()
        return self._build_status().encode()

    async def _on_order(self, message: Msg) -> None:
        """Follow an operator's order to take or refuse jobs; answer with the status."""
        with contextlib.suppress(FormatError):
            self.takes_jobs = parse_order(message.data)
            _log.info("takes jobs" if self.takes_jobs else "takes no more jobs")
            self._wake.set()
        await self._publish_status()
        with contextlib.suppress(*LOST):
            await message.respond(self._build_status().encode())

    # -- reporting

    def _build_status(self) -> WorkerStatus:
        settings = self._service.settings
        return WorkerStatus(
            id=self._identity.id,
            version=__version__,
            address=self._identity.address,
            slots=self._slots.slots,
            running=self._slots.running,
            jobs=tuple(islice(self._runs, MAX_SLOTS)),
            loaded=tuple(sorted(self._placement.loaded)),
            at_work=self._slots.digests,
            room=self._service.engine.room,
            models=dict(islice(self._view.models.items(), MAX_MODELS)),
            kinds=dict(islice(self._view.kinds.items(), MAX_MODELS)),
            aliases=dict(settings.aliases),
            default_model=settings.default_model,
            default_for=tuple(settings.default_for),
            may_pull=settings.pull != NEVER,
            is_draining=not self.takes_jobs,
            done=self.done,
            failed=self.failed,
            rate=round(self._rate.compute_per_minute(), 2),
        )

    async def _publish_status(self) -> None:
        with contextlib.suppress(*LOST, JetStreamError):
            if self._link.is_ready:
                bucket = await self._link.streams.key_value(self._link.names.workers)
                await bucket.put(self._identity.id, self._build_status().encode())

    async def _report(self) -> None:
        """Put the status if it has changed, or is old."""
        await run_io(self._view.read)
        room = self._slots.digests, self._slots.running
        jobs = tuple(self._runs)
        state = self._placement.loaded, self._view.models, room, jobs, self.takes_jobs
        is_due = state != self._last_published or time.monotonic() - self._reported >= REPORT
        if is_due and self._link.is_ready:
            self._last_published, self._reported = state, time.monotonic()
            await self._publish_status()


async def _repeat(work: Callable[[], Awaitable[None]], pause: float) -> None:
    """Repeat work with a pause; an error is logged, and no reason to end."""
    while True:
        try:
            await work()
        except (*LOST, AImageError):
            await asyncio.sleep(LOOK)
        except Exception:
            _log.exception("background work failed")
            await asyncio.sleep(1.0)
        await asyncio.sleep(pause)

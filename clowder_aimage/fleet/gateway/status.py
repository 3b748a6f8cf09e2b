"""The status of a fleet: its workers, its queue, and jobs that were given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nats.js.api import StreamInfo
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.gateway.fair_queue import FairQueue
from clowder_aimage.fleet.gateway.metric import GatewayMetrics
from clowder_aimage.fleet.gateway.waiting import WaitingJobs
from clowder_aimage.fleet.job.envelope import JOB, TICKET
from clowder_aimage.fleet.job.mark import read_chain
from clowder_aimage.fleet.link import LOST, FleetLink
from clowder_aimage.fleet.name import PRIORITIES
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import RejectedStatus, WorkerRegistry, WorkerStatus

# Seconds between two looks at the queue.
INTERVAL = 2.0
# Jobs checked in each turn.
_LOOKS = 5


@dataclass(frozen=True, slots=True)
class QueuedJobs:
    """The jobs of a priority for a model that are on the queue."""

    priority: str
    digest: str
    jobs: int


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """A fleet: its workers, the jobs on its queue, and those that were given up.

    ``waiting`` jobs are in gateways and not on the queue yet: each caller has its turn there.
    ``stored`` of ``room`` bytes are in use. Workers whose statuses are not valid are ``left_out``.
    """

    fleet: str
    workers: Sequence[WorkerStatus]
    left_out: Sequence[RejectedStatus]
    queue: Sequence[QueuedJobs]
    jobs: int
    waiting: int
    stored: int
    room: int | None
    given_up: int


class FleetStatus:
    """Reads the status of one fleet."""

    def __init__(self, link: FleetLink, workers: WorkerRegistry) -> None:
        self._link, self._workers = link, workers
        self._waiting = WaitingJobs(link)
        # Number of the last message on the queue that was looked at.
        self._last_checked = 0

    async def read(self) -> FleetFacts:
        """Return the status. Raises TimeoutError, NatsError."""
        names, streams = self._link.names, self._link.streams
        jobs = await streams.stream_info(names.jobs, subjects_filter=">")
        logs, dead = await streams.stream_info(names.logs), await streams.stream_info(names.dead)
        bodies = await streams.stream_info(names.bodies)
        queued = await self._count_jobs(jobs)
        return FleetFacts(
            fleet=names.fleet,
            workers=self._workers.list_statuses(),
            left_out=self._workers.list_rejected(),
            queue=[
                QueuedJobs(priority, f"sha256:{digest}", count)
                for (priority, digest), count in sorted(queued.items())
            ],
            jobs=queued.total(),
            waiting=await self._waiting.count(),
            stored=logs.state.bytes + jobs.state.bytes + bodies.state.bytes,
            room=logs.config.max_bytes,
            given_up=dead.state.messages,
        )

    async def _count_jobs(self, jobs: StreamInfo) -> Counter[tuple[str, str]]:
        """Count the jobs on the queue by priority and digest.

        NATS 2.9 may count messages that are not there after it was killed, in all and by subject.
        So messages are counted by subject, and when few subjects are left, each is looked for.
        """
        queued: Counter[tuple[str, str]] = Counter()
        subjects = jobs.state.subjects or {}
        for subject, count in subjects.items():
            key = self._link.names.parse_job_subject(subject)
            if key is not None and (len(subjects) > _LOOKS or await self._has_message(subject)):
                queued[key] += count
        return queued

    async def _has_message(self, subject: str) -> bool:
        """Return True if a message of a subject is on the queue."""
        try:
            await self._link.streams.get_msg(
                self._link.names.jobs, seq=1, subject=subject, next=True
            )
        except NotFoundError:
            return False
        return True

    async def observe(self, metrics: GatewayMetrics, queue: FairQueue) -> None:
        """Set the gauges of a gateway, for ever."""
        while True:
            statuses = self._workers.list_statuses()
            metrics.workers.set(sum(not status.is_draining for status in statuses))
            metrics.waiting.set(queue.waiting)
            for priority in PRIORITIES:
                metrics.age.labels(priority).set(queue.compute_age(priority))
            metrics.connected.set(self._link.is_ready)
            # Workers may have joined.
            queue.look()
            with contextlib.suppress(*LOST, JetStreamError):
                if self._link.is_ready:
                    await self._waiting.publish(queue.waiting)
                    await self._measure_queue(metrics)
                    await self._remove_finished()
            await asyncio.sleep(INTERVAL)

    async def _measure_queue(self, metrics: GatewayMetrics) -> None:
        names, streams = self._link.names, self._link.streams
        jobs = await streams.stream_info(names.jobs, subjects_filter=">")
        metrics.depth.set((await self._count_jobs(jobs)).total())
        metrics.dead.set((await streams.stream_info(names.dead)).state.messages)
        consumers = await streams.consumers_info(names.jobs)
        metrics.running.set(sum(consumer.num_ack_pending or 0 for consumer in consumers))

    async def _remove_finished(self) -> None:
        """Look at a few jobs on the queue, in turns, and remove those that are finished.

        A NATS server that was killed may forget that a message was removed, though it remembers its
        acknowledgement: such a message is never delivered again.
        """
        names, streams = self._link.names, self._link.streams
        for _ in range(_LOOKS):
            try:
                message = await streams.get_msg(
                    names.jobs,
                    seq=self._last_checked + 1,
                    subject=f"{names.fleet}.job.>",
                    next=True,
                )
            except NotFoundError:
                self._last_checked = 0
                return
            self._last_checked = message.seq or 0
            if await self._is_over(message.headers or {}):
                await streams.delete_msg(names.jobs, self._last_checked)

    async def _is_over(self, headers: Mapping[str, str]) -> bool:
        """Return True if the job of a message on the queue has ended."""
        try:
            ticket = JobTicket.parse(headers[JOB], headers[TICKET])
        except (LookupError, FormatError):
            # A worker refuses it.
            return False
        return (await read_chain(self._link, ticket)).is_over

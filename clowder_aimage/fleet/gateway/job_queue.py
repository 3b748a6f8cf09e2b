"""The queue of a fleet, as a gateway writes it: signed jobs, their bodies, and their consumers."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from clowder_aimage.engine.admission import compute_share
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import NetworkError
from clowder_aimage.fleet.frame import CHUNK
from clowder_aimage.fleet.job.envelope import BODY, INLINE, JOB, TICKET, StoredBody
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.mark import MarkChain
from clowder_aimage.fleet.job.run import ACK_WAIT
from clowder_aimage.fleet.link import LOST, MESSAGE_ID, RESERVE, FleetLink, FullStoreError
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.caller import compute_name
from clowder_aimage.http.caller_ledger import Bound, CallerBounds

# Seconds after which a queue that no worker asks loses its consumer.
IDLE = 3600.0
# Times that a job is published again.
MAX_PUBLICATIONS = 8
# Seconds between two looks for the consumer of jobs that wait.
LOOK = 10.0


@dataclass(slots=True)
class QueuedJob:
    """A job of this gateway, its ticket, and its message on the queue."""

    job: FleetJob
    ticket: JobTicket
    body: StoredBody | None = None
    # The number of the message, 0 before it is published.
    sequence: int = 0
    publications: int = 0

    @property
    def digest(self) -> str:
        """The hexadecimal part of the model's digest."""
        return self.job.digest.partition(":")[2]


class JobQueue:
    """Puts jobs on the queue, and removes them. ``is_alive`` says if a worker is there.

    ``bound`` is that of the bytes of a caller's bodies, of all gateways.
    """

    def __init__(
        self, link: FleetLink, is_alive: Callable[[str], bool], bound: Bound | None = None
    ) -> None:
        self._link, self._is_alive = link, is_alive
        self._bound = bound or CallerBounds().body_bytes
        # The time at which each consumer was made, or was there.
        self._consumers: dict[tuple[str, str], float] = {}

    async def put(self, queued: QueuedJob) -> None:
        """Publish a job, and announce it. Its message is one message if this is repeated.

        Raises FullStoreError, NetworkError, ApiError, and the exceptions of LOST.
        """
        job, names = queued.job, self._link.names
        await self._make_consumer(queued, IDLE / 2)
        subject = names.build_job_subject(job.priority, queued.digest, job.caller)
        # With pictures it takes too long for the event loop.
        payload = await run_io(job.encode) if job.size > INLINE else job.encode()
        headers = {JOB: job.id, TICKET: queued.ticket.encode()}
        if len(payload) > INLINE:
            body = queued.body or await self._upload(payload, queued)
            headers[BODY], payload = body.encode(), b""
        number = queued.publications
        headers[MESSAGE_ID] = f"{job.id} {number}" if number else job.id
        signed = self._link.sign(subject, payload, headers)
        queued.sequence = await self._link.store(subject, payload, signed)
        await self._publish(names.announcements, f"{subject} {queued.sequence}".encode())

    async def _publish(self, subject: str, data: bytes = b"") -> None:
        await self._link.publish(subject, data, self._link.sign(subject, data))

    async def _upload(self, payload: bytes, queued: QueuedJob) -> StoredBody:
        """Store the chunks of an encoded job under a new id, which begins with its caller's name.

        Raises ApiError (429): the caller has too many bytes in the stream.
        """
        name, names = compute_name(queued.job.caller), self._link.names
        subjects = names.build_body_subject("*", "*")
        stream = await self._link.streams.stream_info(names.bodies, subjects_filter=subjects)
        uploads = (subject.split(".")[-2] for subject in stream.state.subjects or ())
        chunks = sum(upload.startswith(name) for upload in uploads)
        self._find_bound(stream.config).check(chunks * CHUNK + len(payload))
        queued.body = body = StoredBody.of(payload, name + secrets.token_hex(8))
        for number, start in enumerate(range(0, len(payload), CHUNK)):
            subject = names.build_body_subject(body.upload, number)
            headers = {MESSAGE_ID: f"{body.upload} {number}"}
            await self._link.store(subject, payload[start : start + CHUNK], headers)
        return body

    def _find_bound(self, stream: StreamConfig) -> Bound:
        """Return the bound of a caller's bodies: others have a part of a small stream too."""
        size = stream.max_bytes or 0
        if size <= 0:
            return self._bound
        share = compute_share(size - size // RESERVE)
        return replace(self._bound, limit=min(self._bound.limit, share))

    async def _make_consumer(self, queued: QueuedJob, max_age: float) -> None:
        """Make the consumer of a queue, of which workers ask for jobs, unless it is there."""
        key, names = (queued.job.priority, queued.digest), self._link.names
        timestamp = time.monotonic()
        if timestamp - self._consumers.get(key, -IDLE) < max_age:
            return
        config = ConsumerConfig(
            durable_name=names.build_consumer_name(*key),
            filter_subject=names.build_job_subject(*key),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT,
            max_deliver=-1,
            max_ack_pending=65536,
            inactive_threshold=IDLE,
        )
        await self._link.streams.add_consumer(names.jobs, config)
        self._consumers[key] = timestamp

    async def restore(self, queued: QueuedJob, chain: MarkChain) -> None:
        """Publish a job again whose message is gone though it has not ended.

        A worker may acknowledge messages that others got. Raises ApiError: it is lost too often.
        """
        if chain.is_over or not queued.sequence:
            return
        if chain.is_running and chain.begin is not None and self._is_alive(chain.begin.worker):
            return
        with contextlib.suppress(*LOST, FullStoreError, NetworkError):
            await self._make_consumer(queued, LOOK)
            if await self._is_on_queue(queued):
                return
            queued.publications += 1
            if queued.publications > MAX_PUBLICATIONS:
                message = "workers remove the job from the queue, and do not serve it"
                raise ApiError(500, message, code="job_given_up")
            await self.put(queued)

    async def _is_on_queue(self, queued: QueuedJob) -> bool:
        try:
            await self._link.streams.get_msg(self._link.names.jobs, seq=queued.sequence)
        except NotFoundError:
            return False
        return True

    async def cancel(self, queued: QueuedJob) -> None:
        """Remove a job from the queue, and end the work on it."""
        await self._publish(self._link.names.build_cancel_subject(queued.job.id))
        with contextlib.suppress(*LOST, JetStreamError):
            await self._link.streams.delete_msg(self._link.names.jobs, queued.sequence)

    async def discard(self, queued: QueuedJob, *, is_kept: bool) -> None:
        """Remove the body of a job that is over, and its response unless it ``is_kept``."""
        await self.discard_body(queued)
        names = self._link.names
        with contextlib.suppress(*LOST, JetStreamError):
            if not is_kept:
                subject = names.build_log_subject("*", queued.job.id)
                await self._link.remove(names.logs, subject)

    async def discard_body(self, queued: QueuedJob) -> None:
        """Remove the body of a job that is over, or was not admitted."""
        names, body = self._link.names, queued.body
        with contextlib.suppress(*LOST, JetStreamError):
            if body is not None:
                subject = names.build_body_subject(body.upload, "*")
                await self._link.remove(names.bodies, subject)

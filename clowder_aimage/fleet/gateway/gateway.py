"""A gateway: jobs of clients, put on the queue of a fleet, and the responses of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from clowder_aimage.api.model_catalog import build_unknown_error
from clowder_aimage.api.model_list import build_missing_error
from clowder_aimage.engine.admission import ALWAYS, FOR_EVER, NEVER, CallerBusyError
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from clowder_aimage.fleet.frame import (
    ADMITTED,
    BEGIN,
    LAST,
    Frame,
)
from clowder_aimage.fleet.gateway.fair_queue import FairQueue
from clowder_aimage.fleet.gateway.job_queue import JobQueue, QueuedJob
from clowder_aimage.fleet.gateway.metric import RESPONSE, GatewayMetrics
from clowder_aimage.fleet.gateway.operation import JobHeaders
from clowder_aimage.fleet.gateway.parsed_request import ParsedRequest
from clowder_aimage.fleet.gateway.response_relay import ResponseRelay
from clowder_aimage.fleet.gateway.worker_response import build_bad_response_error
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.mark import MarkChain, read_chain
from clowder_aimage.fleet.job.reader import JobReader
from clowder_aimage.fleet.job.request import FORWARDED
from clowder_aimage.fleet.link import (
    LOST,
    FleetLink,
    FullStoreError,
    NotFirstError,
    build_unavailable_error,
)
from clowder_aimage.fleet.name import BATCH, GATEWAY
from clowder_aimage.fleet.signature import SignedMessage
from clowder_aimage.fleet.ticket import Admission, JobTicket
from clowder_aimage.fleet.worker_registry import FleetModel, WorkerWatch
from clowder_aimage.http.api_error import (
    OLLAMA,
    ApiError,
    convert_error,
    convert_registry_error,
    find_interface,
)
from clowder_aimage.http.background import run_in_background, run_in_daemon_thread
from clowder_aimage.http.caller import identify_caller
from clowder_aimage.http.caller_ledger import CallerBounds
from clowder_aimage.http.local_request import Request, count_body
from clowder_aimage.oci import Digest, Reference

# Jobs of a model on the queue that are not begun, at least.
MIN_WINDOW = 8
# Seconds that a request waits until its job is removed from the queue.
WITHDRAWN = 2.0
# Models in a message.
_MAX_NAMED = 10
_log = logging.getLogger("aimage.fleet")


@dataclass(frozen=True, slots=True)
class _AdmittedJob:
    """A job on the queue.

    ``is_kept``: it goes on if its client leaves. ``is_old``: it was admitted before.
    """

    queued: QueuedJob
    is_kept: bool
    is_old: bool = False


class JobGateway:
    """Puts jobs on the queue and passes the responses on.

    ``deadline`` is in seconds; ``most`` jobs may wait in the queue of this gateway, and further
    ones while the estimated wait is shorter than ``max_wait`` seconds. ``bounds``
    are those of each caller. ``resolve`` returns the digest that a registry has for a name.
    """

    def __init__(
        self,
        link: FleetLink,
        watch: WorkerWatch,
        metrics: GatewayMetrics,
        *,
        deadline: float = FOR_EVER,
        most: int = 1000,
        max_wait: float = 0.0,
        bounds: CallerBounds | None = None,
        resolve: Callable[[Reference], Digest],
    ) -> None:
        self._link, self._watch, self._metrics = link, watch, metrics
        self._resolve = resolve
        self._deadline = None if deadline == FOR_EVER else deadline
        self.queue = FairQueue(self.compute_window, most, max_wait=max_wait)
        self._jobs = JobQueue(link, watch.workers.has, (bounds or CallerBounds()).body_bytes)
        self._discarding = set[asyncio.Task[None]]()

    def compute_window(self, digest: str = "") -> int:
        """Return the number of jobs of this gateway, for a model or all, that may be queued."""
        statuses = self._watch.workers.list_statuses()
        slots = [
            status.slots
            for status in statuses
            if not digest or digest in status.kinds or status.may_pull
        ]
        return max(MIN_WINDOW, 2 * sum(slots))

    async def answer(
        self, request: Request, parsed: ParsedRequest, headers: JobHeaders
    ) -> web.StreamResponse:
        """Respond with the response of a worker. Raises AImageError."""
        self._link.check()
        job = await self._make_job(request, parsed, headers.priority)
        if key := headers.key:
            await self._check_kept(job.caller)
            job = replace(job, id=_make_job_id(job.caller, key))
        with self._metrics.observe_job(job.priority) as statuses:
            relay = ResponseRelay(request)
            async with run_in_background(*([relay.keep_alive()] if parsed.is_events else [])):
                answered = await self._serve(relay, job, parsed, is_keyed=bool(key))
            statuses.append(relay.status)
        return answered

    async def _serve(
        self, relay: ResponseRelay, job: FleetJob, parsed: ParsedRequest, *, is_keyed: bool
    ) -> web.StreamResponse:
        """Serve a job; an error after the begin of a stream is its last event."""
        try:
            return await self._serve_in_time(relay, job, parsed, is_keyed=is_keyed)
        except AImageError as error:
            if not relay.has_begun:
                raise
            await relay.fail(convert_error(error))
            return await relay.end()

    async def _serve_in_time(
        self, relay: ResponseRelay, job: FleetJob, parsed: ParsedRequest, *, is_keyed: bool
    ) -> web.StreamResponse:
        is_kept = is_keyed or job.priority == BATCH
        queued = QueuedJob(job, JobTicket.generate(job.id))
        restore = partial(self._jobs.restore, queued)
        try:
            async with (
                asyncio.timeout(self._deadline),
                self.queue.turn(job.caller, job.priority, job.digest) as started,
                JobReader(self._link, job.id, restore).open() as reader,
            ):
                admitting = self._admit(queued, parsed, is_kept=is_kept, is_keyed=is_keyed)
                admitted = await (admitting if is_kept else self._wait_until_admitted(admitting))
                frames = reader.iter_frames(queued.ticket, from_start=admitted.is_old)
                return await self._pass_on(relay, admitted, frames, started)
        except TimeoutError:
            raise ApiError(504, "the deadline has passed", code="deadline_exceeded") from None
        except FormatError as error:
            self._metrics.rejected.labels(RESPONSE).inc()
            _log.warning("bad response", extra={"job": job.id, "reason": error.message})
            raise build_bad_response_error(error) from None
        except ConnectionResetError:
            # Of the client: LOST, below, is of NATS.
            raise
        except LOST as error:
            raise build_unavailable_error(
                "the connection to NATS was lost; try again later"
            ) from error

    # -- admission

    async def _check_kept(self, caller: str) -> None:
        """Raise CallerBusyError if a caller has too many jobs on the queue, of all gateways.

        A job that goes on without its client waits in no gateway.
        """
        names = self._link.names
        subject = names.build_job_subject("*", "*", caller)
        try:
            stream = await self._link.streams.stream_info(names.jobs, subjects_filter=subject)
        except LOST:
            raise build_unavailable_error("NATS does not answer; try again later") from None
        if sum((stream.state.subjects or {}).values()) >= max(MIN_WINDOW, self.queue.share):
            raise CallerBusyError(self.queue.share, 5)

    async def _make_job(self, request: Request, parsed: ParsedRequest, priority: str) -> FleetJob:
        """Return the job of a request, pinned to a digest. Raises ApiError."""
        model = await self._find(request, parsed)
        request["model"] = model.name
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        return FleetJob(
            id=secrets.token_hex(16),
            path=request.rel_url.raw_path_qs,
            scope=request.get("scope", "infer"),
            caller=identify_caller(request),
            asked=parsed.model or "",
            model=model.name,
            digest=model.digest,
            priority=priority,
            headers={**headers, "X-Request-Id": request["id"]},
            fields={**parsed.fields, **parsed.chosen},
            is_form=parsed.is_form,
            timeout=self._deadline,
            size=count_body(request),
        )

    async def _find(self, request: Request, parsed: ParsedRequest) -> FleetModel:
        """Return the model of a request. Raises ApiError."""
        workers = self._watch.workers
        if not workers.list_statuses():
            raise build_unavailable_error("no worker of the fleet is running; try again later")
        try:
            reference, model = workers.resolve_reference(parsed.model), workers.find(parsed.model)
        except NotFoundError as error:
            raise ApiError(404, error.message, code="model_not_found", param="model") from None
        except UsageError as error:
            code = "missing_required_parameter"
            raise ApiError(400, error.message, code=code, param="model") from None
        may_pull = parsed.pull != NEVER and reference.registry is not None and workers.may_pull()
        if model is not None and not (parsed.pull == ALWAYS and may_pull):
            return model
        if may_pull:
            try:
                digest = await run_in_daemon_thread(partial(self._resolve, reference))
            except AImageError as error:
                raise convert_registry_error(error) from None
            return FleetModel(str(reference), str(digest))
        if find_interface(request) == OLLAMA:
            raise build_missing_error(reference)
        raise self._make_not_found(parsed)

    def _make_not_found(self, parsed: ParsedRequest) -> ApiError:
        names = self._watch.workers.list_names(*parsed.kinds)
        if not names:
            return build_unknown_error(parsed.model or "")
        remainder = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        listed = ", ".join(names[:_MAX_NAMED])
        message = f"model {(parsed.model or '')[:200]!r} not found; available: {listed}{remainder}"
        return ApiError(404, message, code="model_not_found", param="model")

    async def _admit(
        self, queued: QueuedJob, parsed: ParsedRequest, *, is_kept: bool, is_keyed: bool
    ) -> _AdmittedJob:
        """Put a job on the queue, unless its idempotency key was used before. Raises ApiError.

        A job that was admitted and not begun is published again, as its gateway may have died
        before it did so; the stream recognises a repetition.
        """
        is_old = False
        try:
            if is_keyed:
                chain = await self._enter(queued, _compute_fingerprint(queued.job, parsed))
                is_old = chain is not None
                if chain is not None and chain.begin is not None:
                    return _AdmittedJob(queued, is_kept, is_old)
            await self._put(queued)
        except FullStoreError:
            raise build_unavailable_error(
                "the queue of the fleet is full; try again later"
            ) from None
        except (NetworkError, *LOST):
            raise build_unavailable_error("NATS does not answer; try again later") from None
        return _AdmittedJob(queued, is_kept, is_old)

    async def _put(self, queued: QueuedJob) -> None:
        try:
            await self._jobs.put(queued)
        except BaseException:
            await self._jobs.discard_body(queued)
            raise

    async def _wait_until_admitted(
        self, admission: Coroutine[Any, Any, _AdmittedJob]
    ) -> _AdmittedJob:
        """Return an admitted job; if the client leaves meanwhile, admit it and remove it again.

        A message that NATS has not acknowledged yet may be on the queue.
        """
        admitting = asyncio.create_task(admission)
        try:
            return await asyncio.shield(admitting)
        except asyncio.CancelledError:
            withdrawing = asyncio.create_task(self._withdraw(admitting))
            await asyncio.wait([withdrawing], timeout=WITHDRAWN)
            raise

    async def _withdraw(self, admitting: asyncio.Task[_AdmittedJob]) -> None:
        # It was not admitted.
        with contextlib.suppress(AImageError):
            await self._cancel((await admitting).queued)

    async def _enter(self, queued: QueuedJob, fingerprint: str) -> MarkChain | None:
        """Enter the job of an idempotency key; return its marks if it was entered earlier.

        Then it has the ticket of that time. Raises ApiError (422): it was another request.
        """
        job, link = queued.job.id, self._link
        subject = link.names.build_mark_subject(GATEWAY, job)
        admission = Admission.build(fingerprint, queued.ticket, link.list_gateways()).encode()
        headers = link.sign(subject, admission, Frame(ADMITTED, 0, 0).headers)
        try:
            await link.store(subject, admission, headers, is_first=True)
        except NotFirstError:
            earlier = await self._read_admission(subject)
        else:
            return None
        if earlier.request != fingerprint:
            text = "the idempotency key was used for another request"
            raise ApiError(422, text, code="idempotency_key_reused")
        ticket = link.open_ticket(job, earlier)
        if ticket is None:
            raise build_unavailable_error(
                "another gateway accepted the request before it knew the key of this one"
            )
        queued.ticket = ticket
        return await read_chain(link, ticket)

    async def _read_admission(self, subject: str) -> Admission:
        """Return the first admission of a job that a gateway has signed. Raises ApiError."""
        link = self._link
        async for _, message in link.read_messages(subject, 0, link.names.marks):
            with contextlib.suppress(VerificationError, FormatError):
                data = message.data or b""
                signed = SignedMessage(message.subject, message.headers or {}, data)
                link.verifier.check_stored(signed, GATEWAY)
                return Admission.decode(data)
        raise build_unavailable_error("the request was accepted earlier and has expired")

    # -- the response

    async def _pass_on(
        self,
        relay: ResponseRelay,
        admitted: _AdmittedJob,
        frames: AsyncGenerator[Frame, None],
        started: Callable[[], None],
    ) -> web.StreamResponse:
        is_over = False
        try:
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    started()
                    if frame.kind == BEGIN:
                        self._metrics.deliveries.inc()
                        self._metrics.retries.inc(frame.attempt > 1)
                    await relay.take(frame)
                    is_over = frame.kind in LAST
            return await relay.end()
        finally:
            if is_over:
                self._discard(admitted)
            elif not admitted.is_kept:
                cancelling = asyncio.create_task(self._cancel(admitted.queued))
                await asyncio.shield(cancelling)

    def _discard(self, admitted: _AdmittedJob) -> None:
        """Remove the body of a job, and its response unless it is kept, in the background."""
        work = self._jobs.discard(admitted.queued, is_kept=admitted.is_kept)
        task = asyncio.create_task(work)
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)

    async def _cancel(self, queued: QueuedJob) -> None:
        """Remove a job from the queue, end the work on it, and remove its body and response."""
        await self._jobs.cancel(queued)
        await self._jobs.discard(queued, is_kept=False)


def _make_job_id(caller: str, key: str) -> str:
    """Return the id of the job of a caller's idempotency key."""
    return hashlib.sha256(f"{caller} {key}".encode()).hexdigest()[:32]


def _compute_fingerprint(job: FleetJob, parsed: ParsedRequest) -> str:
    """Return a digest of a client's request, without the seed and the names chosen here."""
    request = replace(job, headers={}, digest="", model="", timeout=None, fields=parsed.fields)
    return hashlib.sha256(request.encode()).hexdigest()

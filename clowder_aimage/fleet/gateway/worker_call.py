"""Requests to the workers of a fleet without jobs: lists, and changes of stores.

A list joins the lists of all workers. A request for one entry is answered by the first worker that
has it. A change is sent to all workers, a push to one that has the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from pydantic import TypeAdapter

from clowder_aimage.api.answer_stream import NdjsonStream
from clowder_aimage.api.request_body import read_object
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.fleet.field import STRICT, Count, DigestText, Line, is_line, read_fields
from clowder_aimage.fleet.gateway import operation
from clowder_aimage.fleet.gateway.continuation import NDJSON
from clowder_aimage.fleet.gateway.worker_response import (
    ResponseHead,
    build_bad_response_error,
    read_answer_head,
)
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.request import ANSWER, BODY, LINE, PART, STATUS
from clowder_aimage.fleet.link import LOST, FleetLink, build_unavailable_error
from clowder_aimage.fleet.worker_registry import WorkerRegistry, WorkerStatus
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.operation import JSON, Operation
from clowder_aimage.http.response_writer import is_gone
from clowder_aimage.http.route import INFER, Route, serve
from clowder_aimage.oci import Reference, read_json

# Seconds for a list.
PATIENCE = 5.0
# Seconds without a sign of life after which a worker counts as gone.
SILENCE = 10.0
# Seconds between two looks at the progress.
_WATCH = 0.5
_WAITING = {"status": "waiting for workers"}
PUSH = "/api/push"
_STREAMS = ("/api/pull", PUSH)
# Bytes of an answer, and lines of a transfer that differ in more than numbers.
MAX_ANSWER = 256 << 20
_MAX_LINES = 10_000


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The response of one worker."""

    head: ResponseHead
    body: bytes

    @property
    def status(self) -> int:
        """The status of the response."""
        return self.head.status

    def check(self, kind: Any) -> None:
        """Raise FormatError unless the body is of a type, or JSON if it is an error."""
        if self.status < 400 and kind is not None:
            read_fields(_build_adapter(kind), self.body, "its body", MAX_ANSWER)
        elif self.status >= 400 or self.head.media_type in (JSON, NDJSON):
            read_json(self.body, "its body", MAX_ANSWER)

    def build_response(self) -> web.Response:
        """Return the response to the client."""
        answer = self.head.build_response(self.body)
        # Also the last line of a stream.
        if self.status >= 400:
            answer.content_type = JSON
        return answer


@functools.cache
def _build_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass(frozen=True, slots=True)
class TransferLine:
    """A line of a transfer (ollama, "Pull a model"): a step, or the bytes of a blob."""

    __pydantic_config__ = STRICT

    status: Line = ""
    digest: DigestText | None = None
    total: Count = 0
    completed: Count = 0
    size: Count = 0


_LINE = TypeAdapter(TransferLine)
OnLine = Callable[[str, TransferLine], None]
_log = logging.getLogger("aimage.fleet")


class TransferProgress:
    """Joins the lines of workers (ollama, "Pull a model"): the bytes are those of all of them."""

    def __init__(self) -> None:
        # Lines by status and worker.
        self._lines: dict[str, dict[str, TransferLine]] = {}
        # Bytes of all blobs, by worker.
        self._sizes: dict[str, int] = {}
        self._new: dict[str, None] = {}  # in order

    def take(self, worker: str, line: TransferLine) -> None:
        """Take a line of a worker."""
        is_new = line.status not in self._lines
        if is_new and len(self._lines) >= _MAX_LINES:
            return
        self._lines.setdefault(line.status, {})[worker] = line
        self._sizes[worker] = line.size or self._sizes.get(worker, 0)
        if is_new or line.digest:
            self._new[line.status] = None

    def drain_lines(self) -> list[dict[str, Any]]:
        """Return the new lines since the last call, without the end of the transfer."""
        joined = [self._join(status) for status in self._new if status != "success"]
        self._new.clear()
        return joined

    def _join(self, status: str) -> dict[str, Any]:
        lines = list(self._lines[status].values())
        if not lines[-1].digest:
            return {"status": status}
        return {
            "status": status,
            "digest": lines[-1].digest,
            "total": sum(line.total for line in lines),
            "completed": sum(line.completed for line in lines),
            "size": sum(self._sizes.values()),
        }


class WorkerCalls:
    """Sends requests to the workers of a fleet."""

    def __init__(
        self, link: FleetLink, workers: WorkerRegistry, on_reject: Callable[[], object]
    ) -> None:
        self._link, self._workers, self._on_reject = link, workers, on_reject

    def build_routes(self) -> list[Route]:
        """Return the routes of a worker that need no job."""
        served = [
            serve(listing, partial(self._merge, listing, name, key))
            for listing, name, key in operation.LISTS
        ]
        served += [
            serve(question, partial(self._answer_first, question))
            for question in operation.QUESTIONS
        ]
        served += [
            Route(local.method, local.path, _refuse_local, local.scope) for local in operation.LOCAL
        ]
        # Either a failure of one worker fails the request, or one success suffices.
        changes = (
            (operation.PULL, _select_worst),
            (operation.ADD_CONTENT, _select_worst),
            (operation.COPY, select_first),
            (operation.DELETE, select_first),
            (operation.DELETE_CONTENT, select_first),
        )
        return served + [
            serve(change, partial(self._change, change, outcome)) for change, outcome in changes
        ]

    async def call_all(
        self,
        request: Request,
        fields: Any = None,
        patience: float | None = PATIENCE,
        on_line: OnLine | None = None,
        kind: Any = None,
    ) -> list[WorkerAnswer]:
        """Return the responses of all workers that respond, in the order of their ids.

        Without ``patience`` a worker may take as long as it gives signs of life. ``on_line`` takes
        the id of a worker and a line of its transfer. ``kind`` is the type of the body. A response
        that is not valid is left out. Raises ApiError; if no response is valid, 502.
        """
        self._link.check()
        statuses = self._workers.list_statuses()
        if not statuses:
            raise build_unavailable_error("no worker of the fleet is running; try again later")
        if request.path == PUSH:
            statuses = _select_for_push(statuses, fields)
        calls = (
            self._call(request, status.id, fields, patience, on_line, kind) for status in statuses
        )
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        answers, refused = list[WorkerAnswer](), list[FormatError]()
        for status, outcome in zip(statuses, outcomes, strict=True):
            if isinstance(outcome, FormatError):
                self._on_reject()
                facts = {"worker": status.id, "reason": outcome.message}
                _log.warning("bad answer", extra=facts)
                refused.append(outcome)
            elif not isinstance(outcome, BaseException):
                answers.append(outcome)
            elif not isinstance(outcome, LOST):
                raise outcome
        if refused and not answers:
            raise build_bad_response_error(refused[0])
        return answers

    async def _call(
        self,
        request: Request,
        worker: str,
        fields: Any,
        patience: float | None,
        on_line: OnLine | None,
        kind: Any,
    ) -> WorkerAnswer:
        job = FleetJob(
            id=secrets.token_hex(16),
            method=request.method if request.method != "HEAD" else "GET",
            path=request.rel_url.raw_path_qs,
            scope=request.get("scope") or INFER,
            caller="",
            asked="",
            model="",
            digest="",
            headers={"Host": request.host},
            fields=fields,
        )
        data, max_payload = job.encode(), self._link.client.max_payload
        if len(data) > max_payload:
            message = (
                f"the request has {len(data)} bytes, and a message of NATS at most {max_payload}: "
            )
            message += "raise max_payload in the configuration of the NATS server"
            raise ApiError(413, message, code="too_large")
        async with asyncio.timeout(patience):
            answer = await self._ask(worker, data, on_line)
        await run_io(answer.check, kind)
        return answer

    async def _ask(self, worker: str, data: bytes, on_line: OnLine | None) -> WorkerAnswer:
        """Return the response of a worker. Raises NatsError, TimeoutError, FormatError."""
        client = self._link.client
        arrived: asyncio.Queue[Msg] = asyncio.Queue()
        subject = self._link.names.build_call_subject(worker)
        headers = self._link.sign(subject, data)
        inbox = self._link.build_answer_subject()
        async with self._link.listening(inbox, arrived.put):
            await client.publish(subject, data, reply=inbox, headers=headers)
            return await self._collect(arrived, worker, on_line)

    async def _collect(
        self, arrived: asyncio.Queue[Msg], worker: str, on_line: OnLine | None
    ) -> WorkerAnswer:
        """Join the messages of a response, which follow lines of its transfer and a new status.

        Raises TimeoutError after a long silence: the worker may have been restarted.
        """
        body = bytearray()
        while True:
            async with asyncio.timeout(SILENCE):
                message = await arrived.get()
            headers_received = message.headers or {}
            if headers_received.get("Status") == "503":
                raise NoRespondersError
            kind = headers_received.get(PART)
            if kind == STATUS:
                self._workers.read(worker, message.data)
            elif kind == LINE and on_line is not None:
                on_line(worker, read_fields(_LINE, message.data, "a line of a transfer"))
            elif kind == BODY or ANSWER in headers_received:
                body += message.data
            if len(body) > MAX_ANSWER:
                raise FormatError(f"it has more than {MAX_ANSWER} bytes")
            if ANSWER in headers_received:
                head = read_answer_head(headers_received[ANSWER].encode(errors="replace"))
                if len(body) != head.size:
                    # A message was lost.
                    raise TimeoutError
                return WorkerAnswer(head, bytes(body))

    async def _merge(
        self, listing: Operation, field: str, key: str, request: web.Request
    ) -> web.StreamResponse:
        """Respond with the entries of all workers, each once, in the order of the first.

        Entries whose names have control characters are left out.
        If all workers refuse the request, the response is the first refusal.
        """
        entries: dict[str, dict[str, Any]] = {}
        answers = await self.call_all(request, kind=listing.answers[0].body)
        if (best := select_first(answers)).status != 200:
            return best.build_response()
        envelope = read_json(best.body, "a list")
        for answer in answers:
            value = read_json(answer.body, "a list") if answer.status == 200 else {}
            for entry in value.get(field, ()):
                if is_line(name := str(entry.get(key))):
                    entries.setdefault(name, entry)
        return web.json_response({**envelope, field: list(entries.values())})

    async def _answer_first(self, question: Operation, request: web.Request) -> web.StreamResponse:
        """Respond as the first worker that has the requested object."""
        fields = await _read_fields(request)
        kind = question.answers[0].body
        if request.path == PUSH:
            return await self._respond_with_progress(request, fields, select_first, kind)
        return select_first(await self.call_all(request, fields, kind=kind)).build_response()

    async def _change(
        self,
        change: Operation,
        outcome: Callable[[list[WorkerAnswer]], WorkerAnswer],
        request: web.Request,
    ) -> web.StreamResponse:
        """Respond when all workers have changed their stores."""
        fields, kind = await _read_fields(request), change.answers[0].body
        return await self._respond_with_progress(request, fields, outcome, kind)

    async def _respond_with_progress(
        self,
        request: web.Request,
        fields: dict[str, Any] | None,
        outcome: Callable[[list[WorkerAnswer]], WorkerAnswer],
        kind: Any,
    ) -> web.StreamResponse:
        """Respond with the outcome of a transfer; a stream has its progress."""
        is_stream = request.path in _STREAMS and (fields or {}).get("stream", True) is True
        progress, lines = TransferProgress(), NdjsonStream(request)
        on_line = progress.take if is_stream else None
        task = asyncio.create_task(self.call_all(request, fields, None, on_line, kind))
        try:
            while not (await asyncio.wait([task], timeout=_WATCH))[0]:
                if is_gone(request):
                    raise ConnectionResetError("the client disconnected")
                if is_stream:
                    await lines.write(*(progress.drain_lines() or [_WAITING]))
            answer = outcome(task.result())
        finally:
            task.cancel()
        if (remaining := progress.drain_lines()) or lines.has_begun:
            await lines.write(*remaining, read_json(answer.body, "an answer"))
            return await lines.end()
        return answer.build_response()


def _select_for_push(statuses: list[WorkerStatus], fields: Any) -> list[WorkerStatus]:
    """Return a worker that has the model of a push; all of them if none has it."""
    name = str(fields.get("model") or fields.get("name") or "")
    with contextlib.suppress(UsageError):
        name = str(Reference.parse(name))
    return next(([status] for status in statuses if name in status.models), statuses)


async def _refuse_local(request: web.Request) -> web.StreamResponse:
    """Refuse a request for data of a single worker."""
    message = f"a gateway has no {request.path}; ask a worker at its own address: see /v1/fleet"
    raise ApiError(501, message, code="not_at_a_gateway")


async def _read_fields(request: web.Request) -> dict[str, Any] | None:
    raw = await request.read()
    return read_object(raw) if raw or request.method == "POST" else None


def select_first(answers: list[WorkerAnswer]) -> WorkerAnswer:
    """Return the first response that is not an error, else the first one. Raises ApiError."""
    if not answers:
        raise ApiError(504, "no worker responded", code="deadline_exceeded")
    return next((answer for answer in answers if answer.status < 400), answers[0])


def _select_worst(answers: list[WorkerAnswer]) -> WorkerAnswer:
    """Return the first response that is an error, else the first one. Raises ApiError."""
    return next((answer for answer in answers if answer.status >= 400), None) or select_first(
        answers
    )

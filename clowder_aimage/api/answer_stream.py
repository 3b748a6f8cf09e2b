"""Streamed responses: server-sent events (HTML Living Standard, 9.2) and JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from aiohttp import web
from multidict import CIMultiDict

from clowder_aimage.errors import AImageError
from clowder_aimage.http.api_error import ApiError, build_response, convert_error
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.response_writer import ResponseWriter, abort, is_gone

# Seconds between two checks that the client is still connected
TICK = 0.5
# Seconds of silence before a comment is sent: some proxies time out after 15
KEEP_ALIVE = 10.0
# Seconds within which a client must receive a chunk
STALL = 60.0
# Headers of a stream of events
EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-store",
    # Disables nginx's buffering
    "X-Accel-Buffering": "no",
}
# Small enough for a slow client to receive one within STALL
_CHUNK = 64 * 1024

_log = logging.getLogger("aimage.worker")
T = TypeVar("T")


def encode_event(event: str | None, data: Any, *, mark: str | None = None) -> bytes:
    """Return an event with JSON data; clients resume after its id, ``mark``."""
    head = f"id: {mark}\n" if mark is not None else ""
    if event is not None:
        if not event.isprintable():
            raise ValueError(f"invalid event name {event!r}")
        head += f"event: {event}\n"
    if not isinstance(data, str):
        # JSON has no line ends in its texts
        return f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode()
    # All line ends of the standard: a client would split the data at each
    lines = re.split(r"\r\n|\r|\n", data)
    return (head + "".join(f"data: {line}\n" for line in lines) + "\n").encode()


def encode_comment(text: str) -> bytes:
    """Return a comment line. Clients ignore it."""
    return f": {' '.join(text.split())}\n\n".encode()


def add_warnings(headers: CIMultiDict[str], warnings: Iterable[str]) -> None:
    """Add a header for each warning about fields without effect."""
    for text in dict.fromkeys(warnings):
        # Header values are ASCII only
        headers.add("X-Aimage-Warning", text.encode("ascii", "backslashreplace").decode())


class Arrivals(Generic[T]):
    """The events of a generator, collected as they arrive while this context is entered.

    At its end the generator is closed.
    """

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events, self._arrived = events, list[T]()
        self._is_new = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._collect())
        self._task.add_done_callback(lambda _: self._is_new.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            # ``take`` raises it, unless the consumer has left; asyncio logs unretrieved errors
            self._task.exception()

    async def _collect(self) -> None:
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                self._arrived.append(event)
                self._is_new.set()

    async def take(self, every: float | None = None) -> list[T] | None:
        """Return the events since the last call: at least one, or none after ``every`` seconds.

        None is the end. Raises the errors of the generator.
        """
        if not self._arrived and not self._task.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every or TICK):
                    await self._is_new.wait()
        self._is_new.clear()
        arrived, self._arrived = self._arrived, []
        if self._task.done() and not arrived:
            self._task.result()
            return None
        return arrived


async def with_keepalive(
    events: AsyncGenerator[T, None], every: float | None = None
) -> AsyncGenerator[T | None, None]:
    """Yield the events as they arrive, and None after every ``every`` seconds of silence.

    Closing the generator closes ``events`` and waits for that. Raises the errors of ``events``.
    """
    async with Arrivals(events) as arrivals:
        while (arrived := await arrivals.take(every)) is not None:
            for event in arrived:
                yield event
            if not arrived:
                yield None


class EventStream:
    """A response that streams events without buffering.

    ``clock`` measures the silence before a keep-alive comment.
    """

    def __init__(
        self,
        request: Request,
        headers: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request, self._clock = request, clock
        self._sent = clock()
        self.response = web.StreamResponse(headers={**(headers or {}), **EVENT_HEADERS})
        self._writer = ResponseWriter(request, self.response)

    @property
    def has_begun(self) -> bool:
        """Return True if the headers were sent."""
        return self._writer.has_begun

    async def open(self) -> None:
        """Send the headers of the response."""
        await self._writer.begin()

    async def send(self, *frames: bytes) -> None:
        """Send frames without delay. Raises ConnectionResetError."""
        for data in frames:
            for start in range(0, len(data), _CHUNK):
                if is_gone(self._request):
                    raise ConnectionResetError("the client disconnected")
                await self._await_write(self._writer.write(data[start : start + _CHUNK]))
        if frames:
            self._sent = self._clock()

    async def _await_write(self, writing: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(STALL):
                return await writing
        except TimeoutError:
            abort(self._request)
            raise ConnectionResetError("the client stopped reading") from None

    @property
    def is_silent(self) -> bool:
        """Return True if nothing was sent for a long time."""
        return self._clock() - self._sent >= KEEP_ALIVE

    async def keep_alive(self) -> None:
        """Send a comment after a long silence. Raises ConnectionResetError."""
        if is_gone(self._request):
            raise ConnectionResetError("the client disconnected")
        if self.is_silent:
            await self.send(encode_comment("keep-alive"))

    async def close(self) -> web.StreamResponse:
        """End the response. Raises ConnectionResetError."""
        return await self._await_write(self._writer.end())


@dataclass(frozen=True, slots=True)
class StreamForm(Generic[T]):
    """The frames of events: ``frames`` for each, ``end`` after the last.

    ``explain`` returns an error with the field of the request that caused it. ``warnings`` are
    complete when the first event arrives. ``is_early``: the response begins with the first event,
    else with the first frame, or a comment after a long silence.
    """

    frames: Callable[[T], Iterable[bytes]]
    end: Callable[[], Iterable[bytes]]
    explain: Callable[[Exception], Exception]
    warnings: Sequence[str] = ()
    is_early: bool = True


async def stream_events(
    request: Request,
    events: AsyncGenerator[T, None],
    form: StreamForm[T],
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Stream events as they arrive; a disconnection cancels the work.

    An error before the response has begun determines the status; a later one is sent as an event.
    """
    stream = EventStream(request, headers)
    async with Arrivals(events) as arrivals:
        try:
            while (arrived := await arrivals.take()) is not None:
                frames = b"".join(data for event in arrived for data in form.frames(event))
                if not stream.has_begun and (form.is_early or frames or stream.is_silent):
                    add_warnings(stream.response.headers, form.warnings)
                    await stream.open()
                if frames:
                    await stream.send(frames)
                elif not arrived:
                    await stream.keep_alive()
            await stream.send(b"".join(form.end()))
        except ConnectionError:
            raise
        except Exception as error:
            if not stream.has_begun:
                raise form.explain(error) from None
            await stream.send(encode_event("error", _encode_error(request, form.explain(error))))
        return await stream.close()


def _encode_error(request: Request, error: Exception) -> str:
    if not isinstance(error, AImageError):
        # Only the type is logged: the text may contain a prompt
        _log.error("stream failed: %s", type(error).__name__)
        error = ApiError(500, "internal error; see the server's log", code="internal_error")
    api_failure = convert_error(error)
    if api_failure.status >= 500:
        _log.warning("request failed: %s", api_failure.message)
    return build_response(request, api_failure).text or ""


class NdjsonStream:
    """A response of JSON lines, as in ollama's API.

    An error before the first line determines the status of the response. ``headers`` are sent with
    the first line.
    """

    def __init__(self, request: Request) -> None:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        self.headers = response.headers
        self._writer = ResponseWriter(request, response)

    @property
    def has_begun(self) -> bool:
        """Return True if a line was sent."""
        return self._writer.has_begun

    async def write(self, *values: Mapping[str, Any]) -> None:
        """Send lines without delay."""
        if not self.has_begun:
            await self._writer.begin()
        lines = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
        await self._writer.write("".join(f"{line}\n" for line in lines).encode())

    async def fail(self, error: AImageError) -> web.StreamResponse:
        """End with an error: ollama's ``error``, its ``status``, and a ``code``.

        The error is raised if no line was sent.
        """
        if not self.has_begun:
            raise error
        api_failure = convert_error(error)
        facts = {"error": api_failure.message, "status": api_failure.status}
        await self.write({**facts, "code": api_failure.code} if api_failure.code else facts)
        return await self.end()

    async def end(self) -> web.StreamResponse:
        """End the response."""
        return await self._writer.end()

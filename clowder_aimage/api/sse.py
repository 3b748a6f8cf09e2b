"""Server-sent events (HTML Living Standard, "Server-sent events"): frames, and a stream of them.

A client that reads slowly never holds up the source of events, which ends when it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web

TICK = 0.5  # seconds between two looks at whether the client is still there
KEEP_ALIVE = 10.0  # seconds of silence after which a comment is sent: proxies give up after 15
STALL = 60.0  # seconds in which a client must take a piece
_PIECE = 64 * 1024

T = TypeVar("T")


def frame(event: str | None, data: Any, *, number: int | None = None) -> bytes:
    """Return an event whose data is JSON; ``number`` is its id, after which a client resumes."""
    head = f"id: {number}\n" if number is not None else ""
    if event is not None:
        if not event.isprintable():
            raise ValueError(f"not the name of an event: {event!r}")
        head += f"event: {event}\n"
    text = data if isinstance(data, str) else json.dumps(data, allow_nan=False)
    lines = re.split(r"\r\n|\r|\n", text)
    return (head + "".join(f"data: {line}\n" for line in lines) + "\n").encode()


def comment(text: str) -> bytes:
    """Return a line that clients skip."""
    return f": {' '.join(text.split())}\n\n".encode()


async def ticking(
    events: AsyncGenerator[T, None], every: float | None = None
) -> AsyncGenerator[T | None, None]:
    """Yield the events as they come, and None for every ``every`` seconds of silence.

    They are taken at once, however long the consumer takes. Closing this ends them, and returns
    when that is done. Raises their errors.
    """
    coming: asyncio.Queue[T | _End] = asyncio.Queue()
    pump = asyncio.create_task(_pump(events, coming))
    try:
        while True:
            try:
                async with asyncio.timeout(TICK if every is None else every):
                    event = await coming.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, _End):
                if event.error is not None:
                    raise event.error
                return
            yield event
    finally:
        pump.cancel()
        await asyncio.wait([pump])


class _End:
    """The end of events, and its cause."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def _pump(events: AsyncGenerator[T, None], coming: asyncio.Queue[T | _End]) -> None:
    error: Exception | None = None
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                coming.put_nowait(event)
    except Exception as raised:  # it is raised again where the events are read
        error = raised
    coming.put_nowait(_End(error))


def is_gone(request: web.Request) -> bool:
    """Return True if the client has left."""
    return request.transport is None or request.transport.is_closing()


class EventStream:
    """An answer that is a stream of events, without buffering.

    ``clock`` measures the silence after which keep-alive comments are sent.
    """

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request, self._clock = request, clock
        self._said = clock()
        self.response = web.StreamResponse(
            headers={
                **(headers or {}),
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache, no-store",
                "X-Accel-Buffering": "no",  # nginx would collect events otherwise
            }
        )

    async def open(self) -> None:
        """Send the head of the answer."""
        await self.response.prepare(self._request)

    async def send(self, *frames: bytes) -> None:
        """Send frames at once.

        Raises:
            ConnectionResetError: the client has left, or does not read any more.
        """
        for whole in frames:
            for start in range(0, len(whole), _PIECE):
                if is_gone(self._request):
                    raise ConnectionResetError("the client has left")
                await self._in_time(self.response.write(whole[start : start + _PIECE]))
        self._said = self._clock()

    async def _in_time(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(STALL):
                await writing
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from None

    async def keep_alive(self) -> None:
        """Send a comment if nothing has been said for long. Raises ConnectionResetError."""
        if is_gone(self._request):
            raise ConnectionResetError("the client has left")
        if self._clock() - self._said >= KEEP_ALIVE:
            await self.send(comment("keep-alive"))

    async def close(self) -> web.StreamResponse:
        """End the answer. Raises ConnectionResetError."""
        await self._in_time(self.response.write_eof())
        return self.response

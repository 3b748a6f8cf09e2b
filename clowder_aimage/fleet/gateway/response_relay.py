"""The response of a gateway, made of the frames of a job."""

from __future__ import annotations

import asyncio
import contextlib
import time

from aiohttp import web

from clowder_aimage.api.answer_stream import EVENT_HEADERS, KEEP_ALIVE, encode_comment
from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import BEGIN, DATA, DEAD, HEAD, Frame
from clowder_aimage.fleet.gateway.continuation import SSE, Continuation, is_stream
from clowder_aimage.fleet.gateway.worker_response import ResponseHead, read_head, read_job_end
from clowder_aimage.http.api_error import ApiError, build_response
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.response_writer import ResponseWriter, is_gone
from clowder_aimage.oci import read_json

# The head of a stream that begins before that of its worker.
_EARLY = ResponseHead(200, tuple(EVENT_HEADERS.items()))


class ResponseRelay:
    """Makes a response of the frames of a job.

    A stream is sent while it arrives, anything else when it is complete. ``status`` is that of the
    response, or of the error at the end of its stream.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._sent = time.monotonic()
        self._turn = asyncio.Lock()
        self.status = 200
        self._head = _EARLY
        self._body: list[bytes] = []
        self._stream: ResponseWriter | None = None
        self._continuation: Continuation | None = None

    async def take(self, frame: Frame) -> None:
        """Take a frame.

        Raises FormatError, and ApiError if the job failed and no response has begun.
        """
        if frame.kind == BEGIN:
            self._body.clear()
            self._head = _EARLY
            if self._continuation is not None:
                self._continuation.begin()
        elif frame.kind == HEAD:
            self._head = read_head(frame.data)
            self._check_later_head()
        elif frame.kind == DATA:
            await self._relay_data(frame.data)
        elif frame.kind == DEAD:
            end = read_job_end(frame.data)
            await self.fail(ApiError(end.status, end.message, code=end.code))

    def _check_later_head(self) -> None:
        """Raise FormatError if a stream has begun, and does not go on."""
        if self._stream is None or self._head.status >= 400:
            return
        begun = self._stream.response.headers.get("Content-Type", "").partition(";")[0]
        if self._head.media_type != begun:
            raise FormatError(f"its type is {self._head.media_type!r} after {begun!r}")

    async def _relay_data(self, data: bytes) -> None:
        if self._head.status == 200 and is_stream(self._head.media_type):
            if self._continuation is None:
                self._continuation = Continuation(self._head.media_type)
            await self._write(self._continuation.deduplicate(data))
        else:
            self._body.append(data)

    @property
    def has_begun(self) -> bool:
        """Return True if bytes of a stream were sent."""
        return self._stream is not None

    async def keep_alive(self) -> None:
        """Send a comment after each long silence of a stream of events, also before its begin."""
        with contextlib.suppress(ConnectionResetError):
            while True:
                silence = time.monotonic() - self._sent
                if silence < KEEP_ALIVE:
                    await asyncio.sleep(KEEP_ALIVE - silence)
                else:
                    self._continuation = self._continuation or Continuation(SSE)
                    await self._write(encode_comment("keep-alive"))

    async def _write(self, data: bytes) -> None:
        async with self._turn:
            if is_gone(self._request):
                raise ConnectionResetError("the client disconnected")
            if self._stream is None:
                self._stream = ResponseWriter(self._request, web.StreamResponse())
                self._head.apply(self._stream.response)
                await self._stream.begin()
            if data:
                await self._stream.write(data)
                self._sent = time.monotonic()

    async def fail(self, error: ApiError) -> None:
        """End a stream with an error. Raises it if no response has begun."""
        if self._stream is None or self._continuation is None:
            raise error
        self.status = error.status
        self._body.clear()
        text = build_response(self._request, error).text or "{}"
        value = read_json(text.encode(), "an error")
        await self._write(self._continuation.encode_error(error.status, value, error.code))

    async def end(self) -> web.StreamResponse:
        """Return the response, complete."""
        body = b"".join(self._body)
        if self._stream is not None:
            # A later attempt was refused.
            if self._continuation is not None and body:
                await self._fail_late(body)
            return await self._stream.end()
        response = self._head.build_response(body)
        self.status = response.status
        return response

    async def _fail_late(self, body: bytes) -> None:
        assert self._continuation is not None  # noqa: S101
        try:
            value = read_json(body, "an error")
        except FormatError:
            value = {"error": body[:500].decode("utf-8", "replace")}
        self.status = self._head.status
        await self._write(self._continuation.encode_error(self.status, value, None))

"""The response of a gateway, made of the frames of a job."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from clowder_aimage.api.answer_stream import is_gone
from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.continuation import Continuation, is_stream
from clowder_aimage.fleet.job_frame import BEGIN, DATA, DEAD, HEAD, Frame
from clowder_aimage.http.api_error import ApiError, response
from clowder_aimage.oci import read_json


class ResponseRelay:
    """Makes a response of the frames of a job.

    A stream is passed on while it arrives, anything else when it is complete.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._head: dict[str, Any] = {}
        self._body: list[bytes] = []
        self._stream: web.StreamResponse | None = None
        self._continuation: Continuation | None = None

    async def take(self, frame: Frame) -> None:
        """Take a frame. Raises ApiError if the job failed and no response has begun."""
        if frame.kind == BEGIN:
            self._body.clear()
            self._head = {}
            if self._continuation is not None:
                self._continuation.begin()
        elif frame.kind == HEAD:
            self._head = read_json(frame.data, "the head of a response")
        elif frame.kind == DATA:
            await self._data(frame.data)
        elif frame.kind == DEAD:
            facts = read_json(frame.data, "the end of a job")
            await self._fail(ApiError(facts["status"], facts["message"], code=facts["code"]))

    async def _data(self, data: bytes) -> None:
        if self._head["status"] == 200 and is_stream(self._type):
            if self._continuation is None:
                self._continuation = Continuation(self._type)
            await self._write(self._continuation.feed(data))
        else:
            self._body.append(data)

    @property
    def _type(self) -> str:
        named = (text for name, text in self._head["headers"] if name.lower() == "content-type")
        return next(named, "")

    async def _write(self, data: bytes) -> None:
        if is_gone(self._request):
            raise ConnectionResetError("the client disconnected")
        if self._stream is None:
            self._stream = web.StreamResponse()
            self._add_headers(self._stream)
            await self._stream.prepare(self._request)
        if data:
            await self._stream.write(data)

    def _add_headers(self, answer: web.StreamResponse) -> None:
        answer.set_status(self._head["status"])
        for name, text in self._head["headers"]:
            answer.headers.add(name, text)

    async def _fail(self, error: ApiError) -> None:
        if self._stream is None or self._continuation is None:
            raise error
        text = response(self._request, error).text or "{}"
        value = read_json(text.encode(), "an error")
        await self._write(self._continuation.error(error.status, value, error.code))

    async def end(self) -> web.StreamResponse:
        """Return the response, complete."""
        body = b"".join(self._body)
        if self._stream is not None:
            if self._continuation is not None and body:  # a later attempt was refused
                await self._fail_late(body)
            await self._stream.write_eof()
            self._request["ended"] = self._stream.status
            return self._stream
        answer = web.Response(body=body)
        answer.headers.pop("Content-Type", None)
        self._add_headers(answer)
        return answer

    async def _fail_late(self, body: bytes) -> None:
        assert self._continuation is not None  # noqa: S101
        try:
            value = read_json(body, "an error")
        except FormatError:
            value = {"error": body[:500].decode("utf-8", "replace")}
        await self._write(self._continuation.error(self._head["status"], value, None))

"""Streamed responses, to a client or to a caller in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aiohttp import web

from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import LocalRequest, Request, add_recorded_headers


class ResponseWriter:
    """Writes the body of ``response``, whose headers may change until ``begin``."""

    def __init__(self, request: Request, response: web.StreamResponse) -> None:
        self._request, self.response = request, response
        self.has_begun = False

    async def begin(self) -> None:
        """Send status and headers."""
        if isinstance(self._request, web.Request):
            await self.response.prepare(self._request)
        elif self._request.sink is None:
            raise ApiError(400, "stream is not supported here", param="stream")
        else:
            self._request["answered"] = True
            add_recorded_headers(self._request, self.response)
            with _record_failure(self._request):
                await self._request.sink.begin(self.response)
        self.has_begun = True

    async def write(self, data: bytes) -> None:
        """Send bytes of the body. Raises ConnectionError."""
        if isinstance(self._request, web.Request):
            await self.response.write(data)
        elif self._request.sink is not None:
            with _record_failure(self._request):
                await self._request.sink.write(data)

    async def end(self) -> web.StreamResponse:
        """End the response. Raises ConnectionError."""
        if isinstance(self._request, web.Request):
            await self.response.write_eof()
        self._request["ended"] = self.response.status
        return self.response


@contextlib.contextmanager
def _record_failure(request: LocalRequest) -> Iterator[None]:
    """Record an error of the sink for the caller; the handler sees a disconnected client."""
    try:
        yield
    except Exception as error:
        request.failure = error
        raise ConnectionResetError("the response was not taken") from error


def is_gone(request: Request) -> bool:
    """Return True if the client has disconnected. A caller in this process cancels the request."""
    if not isinstance(request, web.Request):
        return False
    return request.transport is None or request.transport.is_closing()


def abort(request: Request) -> None:
    """Close the connection to a client, so that a response does not appear complete."""
    if isinstance(request, web.Request) and request.transport is not None:
        request.transport.abort()

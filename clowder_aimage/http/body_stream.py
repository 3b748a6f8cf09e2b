"""Bodies that are not held in memory: streamed requests, and responses from a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import BinaryIO, TypeVar

from aiohttp import web

from clowder_aimage.http.api_error import ApiError

# Seconds to wait for the next byte, and over which the speed is measured
READ_TIMEOUT = 60.0
# Minimum average of bytes received per second
MIN_SPEED = 1024
# Bytes that the client must take within SEND_TIMEOUT
SEND_CHUNK = 4 * 1024 * 1024
# Seconds: a slower client would occupy a file and a connection indefinitely
SEND_TIMEOUT = 300.0
_T = TypeVar("_T")
_TYPES = ("", "application/json", "application/x-www-form-urlencoded", "multipart/form-data")


def check_coding(request: web.Request) -> None:
    """Refuse a body with a Content-Encoding (RFC 9110, 15.5.16). Raises ApiError (415)."""
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity") and request.body_exists:
        message = f"unsupported Content-Encoding {coding[:60]!r}: send the body as it is"
        headers = {"Accept-Encoding": "identity"}
        raise ApiError(415, message, code="unsupported_media_type", headers=headers)


def check_type(request: web.Request, *alternatives: str) -> None:
    """Refuse a body that is not declared as JSON. Raises ApiError (415).

    The message names ``alternatives`` too. Clients that upload blobs to a wrong URL declare bytes.
    curl declares a form, and some clients declare nothing: both are accepted. Routes refuse
    multipart bodies themselves, with a better message.
    """
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type not in _TYPES:
        expected = " or ".join(("application/json", *alternatives))
        message = f"unsupported Content-Type {media_type[:60]!r}: expected {expected}"
        raise ApiError(415, message, code="unsupported_media_type")


def build_size_error() -> ApiError:
    """Return the response to a body that exceeds its limit."""
    return ApiError(413, "the request body is too large", code="too_large")


class ClientPace:
    """The time that a client takes to send a body, without that of the local disk."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._waited, self._count = 0.0, 0

    async def wait(self, arriving: Awaitable[_T]) -> _T:
        """Return what arrives. Raises ApiError (408) if nothing does."""
        began = self._clock()
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                return await arriving
        except TimeoutError:
            raise _build_timeout_error(f"no data received for {READ_TIMEOUT:.0f} seconds") from None
        finally:
            self._waited += self._clock() - began

    def count(self, size: int) -> None:
        """Count bytes that arrived. Raises ApiError (408) if they are too few for the time."""
        self._count += size
        if self._waited > READ_TIMEOUT:
            if self._count < MIN_SPEED * READ_TIMEOUT:
                raise _build_timeout_error(f"received less than {MIN_SPEED} bytes per second")
            self._waited, self._count = 0.0, 0


async def read_chunks(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises ApiError (408) if nothing arrives or it is too slow."""
    pace = ClientPace()
    while chunk := await pace.wait(request.content.readany()):
        pace.count(len(chunk))
        yield chunk


def _build_timeout_error(message: str) -> ApiError:
    return ApiError(408, message, code="BLOB_UPLOAD_INVALID")


async def send_file(
    request: web.Request,
    file: BinaryIO,
    offset: int,
    count: int,
    *,
    chunk_size: int = SEND_CHUNK,
    timeout: float = SEND_TIMEOUT,
) -> None:
    """Send ``count`` bytes of ``file`` by sendfile(2), each chunk within ``timeout`` seconds.

    The headers have been sent already, so a failure closes the connection. Raises
    ConnectionError if the client disconnects or stalls, or if the file is too short.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client disconnected")
    loop = asyncio.get_running_loop()
    try:
        while count:
            async with asyncio.timeout(timeout):
                sent = await loop.sendfile(transport, file, offset, min(count, chunk_size))
            if not sent:
                raise ConnectionResetError("the blob was truncated while it was sent")
            offset, count = offset + sent, count - sent
            request["sent"] = request.get("sent", 0) + sent
    except (OSError, RuntimeError) as error:
        # RuntimeError: the transport is closing
        transport.abort()
        raise ConnectionResetError(str(error)) from error


async def send_growing_file(
    request: web.Request,
    file: BinaryIO,
    start: int,
    end: int,
    wait: Callable[[int], Awaitable[int]],
    *,
    chunk_size: int = SEND_CHUNK,
    timeout: float = SEND_TIMEOUT,
) -> None:
    """Send the bytes [start, end) of a file that is still growing, as ``send_file`` does.

    ``wait(offset)`` returns the available end of the file once it exceeds ``offset``. Raises
    ConnectionError, also if the file stops growing.
    """
    while start < end:
        try:
            front = min(end, await wait(start))
        except ConnectionError:
            if request.transport is not None:
                # The response must not appear complete
                request.transport.abort()
            raise
        await send_file(request, file, start, front - start, chunk_size=chunk_size, timeout=timeout)
        start = front

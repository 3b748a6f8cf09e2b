"""Responses with the bytes of a blob, also while they arrive."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import BinaryIO

from aiohttp import web

from clowder_aimage.distribution.arrival import Arrival
from clowder_aimage.distribution.served_blobs import MEDIA_TYPE
from clowder_aimage.errors import AImageError
from clowder_aimage.http.body_stream import SEND_CHUNK, SEND_TIMEOUT, send_file, send_growing_file
from clowder_aimage.oci import Digest


def build_content_headers(digest: Digest) -> dict[str, str]:
    """Return the headers that identify the content of a response."""
    return {"Docker-Content-Digest": str(digest), "ETag": f'"{digest}"'}


async def begin_response(
    request: web.Request, digest: Digest, size: int, byte_range: tuple[int, int] | None
) -> web.StreamResponse:
    """Send the head of a response with the bytes of ``byte_range``, or all of them."""
    headers = build_content_headers(digest) | {"Accept-Ranges": "bytes"}
    start, end = byte_range or (0, size)
    if byte_range is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    response = web.StreamResponse(status=200 if byte_range is None else 206, headers=headers)
    response.content_type = MEDIA_TYPE
    response.content_length = end - start
    await response.prepare(request)
    return response


async def send_body(
    request: web.Request,
    file: BinaryIO,
    start: int,
    end: int,
    arrival: Arrival | None,
    *,
    origin: int = 0,
    chunk_size: int = SEND_CHUNK,
    timeout: float = SEND_TIMEOUT,
) -> None:
    """Send the bytes [start, end) of a file; the content of ``arrival`` begins at ``origin``.

    Raises ConnectionError, also if the arrival fails, or if nothing arrives for ``timeout``.
    """
    if arrival is None:
        await send_file(request, file, start, end - start, chunk_size=chunk_size, timeout=timeout)
    else:
        wait = partial(_wait, arrival, origin, timeout)
        await send_growing_file(
            request, file, start, end, wait, chunk_size=chunk_size, timeout=timeout
        )


async def _wait(arrival: Arrival, origin: int, timeout: float, offset: int) -> int:
    try:
        async with asyncio.timeout(timeout):
            return origin + await arrival.wait(offset - origin)
    except TimeoutError:
        raise ConnectionResetError("no more data has arrived") from None
    except AImageError as error:
        raise ConnectionResetError(error.message) from error

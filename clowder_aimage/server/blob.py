"""Pulling blobs (distribution-spec, "Pulling blobs"): the file goes to the socket in the kernel."""

from __future__ import annotations

import asyncio
import os
import re
from typing import BinaryIO

from aiohttp import web

from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.server.error import ApiError
from clowder_aimage.server.name import digest_of

MEDIA_TYPE = "application/octet-stream"
_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


class BlobRoutes:
    """Blobs of the layout. It is one store: a blob is found under every repository name."""

    def __init__(self, layout: ImageLayout) -> None:
        self._layout = layout

    async def get(self, request: web.Request) -> web.StreamResponse:
        """HEAD and GET /v2/<name>/blobs/<digest>, with Range (206, 416) and ETag (304)."""
        digest = digest_of(request)
        file = await asyncio.to_thread(open_blob, self._layout, digest)
        with file:
            size = os.fstat(file.fileno()).st_size
            headers = content_headers(digest) | {"Accept-Ranges": "bytes"}
            if is_current(request, digest):
                return web.Response(status=304, headers=headers)
            return await _answer(request, file, size, headers)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE of a blob: other manifests of the layout may need it; collection removes it."""
        digest_of(request)
        message = "blobs are removed by garbage collection, not one by one"
        raise ApiError("UNSUPPORTED", message=message, headers={"Allow": "GET, HEAD"})


def open_blob(layout: ImageLayout, digest: Digest) -> BinaryIO:
    """The file of a blob, opened; it stays readable if its name goes away meanwhile."""
    try:
        return layout.path(Descriptor(MEDIA_TYPE, digest, 0)).open("rb")
    except (NotFoundError, FileNotFoundError):
        raise ApiError("BLOB_UNKNOWN", {"digest": str(digest)}) from None


def content_headers(digest: Digest) -> dict[str, str]:
    """What names the content in every answer that carries or describes it."""
    return {"Docker-Content-Digest": str(digest), "ETag": f'"{digest}"'}


def is_current(request: web.Request, digest: Digest) -> bool:
    """Whether the client has it: a digest is a strong ETag (RFC 9110, "If-None-Match")."""
    known = request.headers.get("If-None-Match", "")
    return f'"{digest}"' in known or known.strip() == "*"


async def _answer(
    request: web.Request, file: BinaryIO, size: int, headers: dict[str, str]
) -> web.StreamResponse:
    span = wanted_range(request, size, headers["ETag"])
    start, end = span or (0, size)
    if span:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    response = web.StreamResponse(status=206 if span else 200, headers=headers)
    response.content_type = MEDIA_TYPE
    response.content_length = end - start
    await response.prepare(request)
    if request.method != "HEAD" and end > start:
        await _send(request, file, start, end - start)
    await response.write_eof()
    return response


async def _send(request: web.Request, file: BinaryIO, offset: int, count: int) -> None:
    """Hand the bytes to the kernel (sendfile). The head is out: a failure closes the connection."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    try:
        sent = await asyncio.get_running_loop().sendfile(transport, file, offset, count)
    except (OSError, RuntimeError) as error:  # RuntimeError: the transport is closing
        transport.abort()
        raise ConnectionResetError(str(error)) from error
    if sent != count:
        transport.abort()
        raise ConnectionResetError("the blob was cut short while it was sent")


def wanted_range(request: web.Request, size: int, etag: str) -> tuple[int, int] | None:
    """The span [start, end) that a GET asks for, or None for the whole.

    As RFC 9110 allows, several ranges at once, other units, what does not parse and a Range whose
    If-Range no longer holds are answered with the whole.

    Raises:
        ApiError: 416, the span begins past the end.
    """
    match = _RANGE.fullmatch(request.headers.get("Range", "").replace(" ", ""))
    if request.method != "GET" or match is None or not any(match.groups()):
        return None
    if request.headers.get("If-Range", etag) != etag:
        return None
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= size:
        headers = {"Content-Range": f"bytes */{size}"}
        message = f"the blob has {size} bytes"
        raise ApiError("SIZE_INVALID", message=message, status=416, headers=headers)
    return start, end

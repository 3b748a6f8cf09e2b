"""Routes of blobs (distribution-spec, "Pulling blobs", "Deleting Blobs")."""

from __future__ import annotations

import os
import re
from typing import BinaryIO

from aiohttp import web

from clowder_aimage.distribution.blob_fetch import CachedFetch
from clowder_aimage.distribution.blob_response import (
    begin_response,
    build_content_headers,
    send_body,
)
from clowder_aimage.distribution.cache import PullThroughCache
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.repository_name import is_of_peer, read_digest, read_repository
from clowder_aimage.distribution.served_blobs import ServedBlobs
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.oci import Digest

_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


class BlobRoutes:
    """Blobs of the layout, and of the upstream if there is one."""

    def __init__(self, blobs: ServedBlobs, cache: PullThroughCache | None) -> None:
        self._blobs, self._cache = blobs, cache

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answer HEAD and GET /v2/<name>/blobs/<digest>, with Range (206, 416) and ETag (304)."""
        repository, digest = read_repository(request), read_digest(request)
        cache = None if is_of_peer(request) else self._cache
        if request.method == "HEAD":
            if cache is not None:
                size = await cache.get_size(repository, digest)
            else:
                size = await run_io(self._blobs.read_size, repository, digest)
            return await _head(request, digest, size)
        fetch = None if cache is None else await cache.fetch_blob(repository, digest)
        if fetch is not None:
            size = fetch.content.size
            with await run_io(fetch.open) as file:
                return await _send(request, digest, file, size, fetch)
        with await run_io(self._blobs.serve, repository, digest) as file:
            return await _send(request, digest, file, os.fstat(file.fileno()).st_size)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Answer DELETE /v2/<name>/blobs/<digest>, of a blob that no manifest of <name> needs."""
        await run_locking(self._blobs.remove, read_repository(request), read_digest(request))
        return web.Response(status=202)


def is_current(request: web.Request, digest: Digest) -> bool:
    """Return True if the client has the content: a digest is a strong ETag (RFC 9110, 13.1.2)."""
    etags = request.headers.get("If-None-Match", "")
    return f'"{digest}"' in etags or etags.strip() == "*"


async def _head(request: web.Request, digest: Digest, size: int) -> web.StreamResponse:
    """Answer without a body: to HEAD, or 304 to a client that has the content."""
    if is_current(request, digest):
        headers = build_content_headers(digest) | {"Accept-Ranges": "bytes"}
        return web.Response(status=304, headers=headers)
    response = await begin_response(request, digest, size, None)
    await response.write_eof()
    return response


async def _send(
    request: web.Request,
    digest: Digest,
    file: BinaryIO,
    size: int,
    fetch: CachedFetch | None = None,
) -> web.StreamResponse:
    """Send a blob, possibly while it is being fetched from the upstream.

    In that case a Range is honoured if its bytes have arrived; otherwise the whole blob is sent
    (RFC 9110, 14.2): bytes arrive in order, and a client that waits for later ones would time out.
    """
    if is_current(request, digest):
        return await _head(request, digest, size)
    byte_range = _parse_range(request, size, f'"{digest}"')
    if fetch is not None and byte_range is not None and byte_range[1] > fetch.front:
        byte_range = None
    response = await begin_response(request, digest, size, byte_range)
    start, end = byte_range or (0, size)
    await send_body(request, file, start, end, fetch)
    await response.write_eof()
    return response


def _parse_range(request: web.Request, size: int, etag: str) -> tuple[int, int] | None:
    """Return the range [start, end) that a GET requests, or None for the whole blob.

    Several ranges, other units, a malformed Range and an outdated If-Range select the whole blob.
    Raises 416 if the range begins past the end, or after its own end (RFC 9110).
    """
    match = _RANGE.fullmatch(request.headers.get("Range", "").replace(" ", ""))
    if match is None or not any(match.groups()):
        return None
    if request.headers.get("If-Range", etag) != etag:
        return None
    first, last = match.groups()
    if not first:
        # A suffix range: the last bytes of the blob (RFC 9110, 14.1.2)
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= size or start >= end:
        headers = {"Content-Range": f"bytes */{size}"}
        message = f"range not satisfiable: the blob has {size} bytes"
        raise DistributionError("SIZE_INVALID", message=message, status=416, headers=headers)
    return start, end

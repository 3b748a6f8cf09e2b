"""Routes of uploads (distribution-spec, "Pushing blobs"), into an ingest of the layout."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.repository_name import (
    parse_digest,
    parse_repository,
    read_repository,
)
from clowder_aimage.distribution.served_blobs import MEDIA_TYPE, ServedBlobs
from clowder_aimage.distribution.upload_session import (
    WRITE_SIZE,
    UploadSession,
    UploadSessions,
    build_size_error,
)
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.oci import Digest

# Seconds that a status request waits for the upload's writer
SETTLE = 0.1
ALGORITHMS = ("sha256", "sha512")
_CONTENT_RANGE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


class PushRoutes:
    """The steps of an upload: POST begins it, PATCH appends, PUT ends it, DELETE aborts it."""

    def __init__(self, blobs: ServedBlobs, uploads: UploadSessions) -> None:
        self._blobs, self._uploads = blobs, uploads

    async def begin(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v2/<name>/blobs/uploads/: begin, mount (201 or 202) or receive all of it."""
        repository = read_repository(request)
        if "mount" in request.query:
            digest = parse_digest(request.query["mount"])
            source = request.query.get("from")
            if source is not None:
                parse_repository(source)
            if await run_locking(self._blobs.mount, repository, digest, source):
                return _respond_created(repository, digest)
        announced = request.query.get("digest-algorithm", "sha256")
        if announced not in ALGORITHMS:
            message = (
                f"unsupported algorithm {announced[:40]!r}: expected {' or '.join(ALGORITHMS)}"
            )
            raise DistributionError("DIGEST_INVALID", message=message)
        stated_digest = request.query.get("digest")
        single = parse_digest(stated_digest) if stated_digest is not None else None
        # ollama first sends an empty body (server/upload.go, "Prepare")
        is_announced = request.headers.get("X-Content-Length", "0") != "0"
        if single is not None and is_announced and not request.content_length:
            if await run_io(self._blobs.has, repository, single):
                return _respond_created(repository, single)
            single = None
        upload = await self._uploads.begin(repository)
        if single is None:
            self._uploads.suspend(upload)
            return _accept(upload)
        try:
            await self._finish(request, upload, single)
        finally:
            await self._uploads.abort(upload)
        return _respond_created(repository, single)

    async def append(self, request: web.Request) -> web.StreamResponse:
        """Answer PATCH <location>: one more chunk, in order ("Pushing a blob in chunks")."""
        async with self._holding(request) as upload, self._receiving(request, upload) as rest:
            if rest:
                await self._uploads.write(upload, rest, is_small=True)
        return _accept(upload)

    async def finish(self, request: web.Request) -> web.StreamResponse:
        """Answer PUT <location>?digest=<digest>: the last chunk, if any, and the end."""
        async with self._holding(request) as upload:
            if "digest" not in request.query:
                message = "PUT of an upload requires ?digest="
                raise DistributionError("DIGEST_INVALID", message=message)
            digest = parse_digest(request.query["digest"])
            await self._finish(request, upload, digest)
        return _respond_created(upload.repository, digest)

    async def get_status(self, request: web.Request) -> web.StreamResponse:
        """Answer GET <location>: the range of received bytes; a broken upload resumes after it."""
        upload = await self._find(request)
        # Bytes of a broken request may still be written
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE), upload.lock:
                pass
        return web.Response(status=204, headers=_build_headers(upload))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """Answer DELETE <location>: abort the upload."""
        async with self._holding(request) as upload:
            await self._uploads.abort(upload)
        return web.Response(status=204)

    async def _find(self, request: web.Request) -> UploadSession:
        return await self._uploads.find(read_repository(request), request.match_info["upload"])

    def _holding(self, request: web.Request) -> AbstractAsyncContextManager[UploadSession]:
        return self._uploads.hold(read_repository(request), request.match_info["upload"])

    async def _finish(self, request: web.Request, upload: UploadSession, digest: Digest) -> None:
        async with self._receiving(request, upload) as rest:
            adding = self._blobs.adding(upload.repository, digest)
            await self._uploads.commit(upload, digest, MEDIA_TYPE, rest, adding)

    @contextlib.asynccontextmanager
    async def _receiving(
        self, request: web.Request, upload: UploadSession
    ) -> AsyncIterator[memoryview]:
        """Write the body to the upload, and yield its last bytes, which are left to the caller."""
        end = _parse_content_range(request, upload)
        if not request.body_exists:
            yield memoryview(b"")
            return
        if (size := request.content_length or 0) > WRITE_SIZE:
            await self._uploads.check_space(upload, size)
        async with self._uploads.receiving(upload, request, end) as rest:
            if end is not None and upload.offset + len(rest) != end:
                await self._uploads.write(upload, rest, is_small=True)
                raise build_size_error("the body is shorter than Content-Range")
            yield rest


def _parse_content_range(request: web.Request, upload: UploadSession) -> int | None:
    """Return the offset of the upload after this chunk, if its Content-Range has one.

    Raises 416 if the chunk does not begin at the end of the last one.
    """
    text = request.headers.get("Content-Range")
    if text is None:
        return None
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        message = f"invalid Content-Range {text[:100]!r}: expected <start>-<end>"
        raise DistributionError("BLOB_UPLOAD_INVALID", message=message)
    start, end = int(match[1]), int(match[2]) + 1
    if start != upload.offset:
        message = f"expected a chunk at offset {upload.offset}, not {start}"
        headers = _build_headers(upload)
        raise DistributionError("BLOB_UPLOAD_INVALID", message=message, status=416, headers=headers)
    if request.content_length is not None and end - start != request.content_length:
        raise build_size_error(
            f"Content-Range {text} does not match Content-Length {request.content_length}"
        )
    return end


def _build_headers(upload: UploadSession) -> dict[str, str]:
    return {"Location": upload.location, "Range": upload.range, "Docker-Upload-UUID": upload.id}


def _accept(upload: UploadSession) -> web.Response:
    return web.Response(status=202, headers=_build_headers(upload))


def _respond_created(repository: str, digest: Digest) -> web.Response:
    location = f"/v2/{repository}/blobs/{digest}"
    headers = {"Location": location, "Docker-Content-Digest": str(digest)}
    return web.Response(status=201, headers=headers)

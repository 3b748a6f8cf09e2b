"""Uploads in progress: received bytes and expiry."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from aiohttp import web

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.store import Ingest
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import NoSpaceError, VerificationError
from clowder_aimage.http.body_receiver import BodyReceiver
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.ingest_directory import IngestDirectory, open_ingests
from clowder_aimage.oci import Descriptor, Digest

# The names of the ingests of uploads begin with it
PREFIX = "upload-"
# Bytes written and hashed at a time
WRITE_SIZE = 1024 * 1024
# Buffers that are kept for the next upload
MAX_SPARE = 16
# Bodies that are taken from their sockets: each needs two more descriptors
MAX_DIRECT = 32
# Seconds without a byte after which an upload is aborted
EXPIRY = 3600.0
# Each holds a file open
MAX_UPLOADS = 256
# Seconds without a byte after which a new upload may replace one
IDLE = 60.0
# Bytes per second, below which an upload that is older than its expiry is aborted
SLOWEST = 1024


@dataclass(slots=True, eq=False)
class UploadSession:
    """One blob being received; ``offset`` bytes of it are in the ingest, which the first begin.

    A writer holds ``lock``: a client that retries while its first request is still being read
    waits, and then finds an unexpected offset.
    """

    id: str
    repository: str
    touched: float
    started: float
    ingest: Ingest | None = None
    offset: int = 0
    # Bytes being written, which count for the quota already
    writing: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def location(self) -> str:
        """The path for the next chunk of the upload."""
        return f"/v2/{self.repository}/blobs/uploads/{self.id}"

    @property
    def range(self) -> str:
        """The range of received bytes, inclusive; also ``0-0`` for no bytes."""
        return f"0-{max(0, self.offset - 1)}"


class UploadSessions:
    """All uploads of a server; they end with it.

    Args:
        layout: The store.
        clock: Monotonic time in seconds.
        expiry: The seconds without a byte until an upload is aborted.
        quota: The bytes that all unfinished uploads may have together; 0 for any.
    """

    def __init__(
        self, layout: ImageLayout, clock: Callable[[], float], expiry: float, quota: int = 0
    ) -> None:
        self._layout, self._clock, self.expiry, self._quota = layout, clock, expiry, quota
        self._uploads: dict[str, UploadSession] = {}
        self._beginning = 0
        self._spare: list[memoryview] = []
        self._direct = 0
        # Open while there are uploads
        self._ingests: IngestDirectory | None = None

    def __len__(self) -> int:
        return len(self._uploads) + self._beginning

    async def begin(self, repository: str) -> UploadSession:
        """Begin an upload. Raises DistributionError: TOOMANYREQUESTS."""
        # Counted before anything is awaited: concurrent requests must not exceed the limit
        self._beginning += 1
        try:
            if len(self) > MAX_UPLOADS and not await self._abort_idle():
                raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
        finally:
            self._beginning -= 1
        key, timestamp = secrets.token_hex(16), self._clock()
        upload = self._uploads[key] = UploadSession(key, repository, timestamp, timestamp)
        return upload

    def suspend(self, upload: UploadSession) -> None:
        """End a request that does not end its upload."""

    def _build_id(self, repository: str) -> str:  # noqa: ARG002 - it has no other repository
        return secrets.token_hex(16)

    async def _abort_idle(self) -> bool:
        """Abort the upload that has been idle for longest, if that is at least IDLE seconds."""
        idle = [upload for upload in self._uploads.values() if not upload.lock.locked()]
        oldest = min(idle, key=lambda upload: upload.touched, default=None)
        if oldest is None or oldest.touched > self._clock() - IDLE:
            return False
        await self.abort(oldest)
        return True

    def get(self, repository: str, key: str) -> UploadSession:
        """Return an upload of a repository. Raises BLOB_UPLOAD_UNKNOWN, also once it has ended."""
        upload = self._uploads.get(key)
        if upload is None or upload.repository != repository:
            raise build_unknown_error(key)
        return upload

    async def find(self, repository: str, key: str) -> UploadSession:
        """Return an upload as ``get`` does, with the bytes that others have received."""
        return self.get(repository, key)

    @contextlib.asynccontextmanager
    async def hold(self, repository: str, key: str) -> AsyncIterator[UploadSession]:
        """Wait for the writer of an upload, and be its writer. Raises as ``get``."""
        upload = self.get(repository, key)
        async with upload.lock:
            yield self.get(repository, key)

    @contextlib.asynccontextmanager
    async def receiving(
        self, upload: UploadSession, request: web.Request, end: int | None = None
    ) -> AsyncIterator[memoryview]:
        """Append the body of a request, and yield its last bytes, which are left to the caller.

        A buffer is written while the next one is filled. Received bytes survive a broken
        connection. Raises DistributionError: SIZE_INVALID if the upload would end after ``end``;
        and the errors of ``write`` and of ``BodyReceiver.fill``.
        """
        body = BodyReceiver(request, may_bypass=self._direct < MAX_DIRECT)
        self._direct += body.is_large
        try:
            async with self._filling(upload, body, end) as rest:
                yield rest
        finally:
            self._direct -= body.is_large
            body.close()

    @contextlib.asynccontextmanager
    async def _filling(
        self, upload: UploadSession, body: BodyReceiver, end: int | None
    ) -> AsyncIterator[memoryview]:
        buffers = [self._take_buffer()]
        buffer, offset, writing = buffers[0], upload.offset, None
        try:
            while (count := await body.fill(buffer)) == len(buffer):
                offset = _advance(offset, count, end)
                if writing is not None:
                    await _join(writing)
                work = self.write(upload, buffer, is_small=not body.is_large)
                writing = asyncio.create_task(work)
                if len(buffers) == 1:
                    buffers.append(self._take_buffer())
                buffer = buffers[buffer is buffers[0]]
            _advance(offset, count, end)
        except BaseException as error:
            if writing is not None:
                await _join(writing)
            # What exceeds its Content-Range or the quota is not a part of the upload
            if body.filled and not isinstance(error, DistributionError):
                await self.write(upload, buffer[: body.filled])
            raise
        if writing is not None:
            await _join(writing)
        yield buffer[:count]
        # After an error, a thread may still read them
        self._spare += buffers[: MAX_SPARE - len(self._spare)]

    def _take_buffer(self) -> memoryview:
        return self._spare.pop() if self._spare else new_buffer(WRITE_SIZE)

    async def write(
        self, upload: UploadSession, data: bytes | memoryview, *, is_small: bool = False
    ) -> None:
        """Append ``data``; abort the upload if there is no space for it.

        An upload that begins ``is_small`` is written through the page cache. Raises NoSpaceError,
        and DistributionError: TOOMANYREQUESTS beyond the quota.
        """
        self.get(upload.repository, upload.id)
        upload.writing = len(data)
        try:
            await self._check_quota(upload)
            await run_io(self._write, upload, data, is_small=is_small)
        except NoSpaceError:
            await self.abort(upload)
            raise
        finally:
            upload.writing = 0
        upload.offset += len(data)
        upload.touched = self._clock()

    def _write(self, upload: UploadSession, data: bytes | memoryview, *, is_small: bool) -> None:
        self._open_ingest(upload, is_small=is_small).write_at(upload.offset, data)

    def _open_ingest(self, upload: UploadSession, *, is_small: bool) -> Ingest:
        """Return the ingest of an upload, which the first bytes begin."""
        if upload.ingest is None:
            key, directory = f"{PREFIX}{upload.id}", self._ingests if is_small else None
            upload.ingest = self._layout.ingest(key, directory=directory)
            if is_small and directory is None:
                # The first one is opened by its path, which reports what is wrong with the store
                self._ingests = open_ingests(self._layout.root)
        return upload.ingest

    async def _check_quota(self, upload: UploadSession) -> None:
        while self._quota and await self._count_bytes() > self._quota:
            if not await self._abort_idle():
                await self.abort(upload)
                message = f"unfinished uploads may have {self._quota} bytes together"
                headers = {"Retry-After": str(int(IDLE))}
                raise DistributionError("TOOMANYREQUESTS", message=message, headers=headers)

    async def _count_bytes(self) -> int:
        return sum(upload.offset + upload.writing for upload in self._uploads.values())

    async def check_space(self, upload: UploadSession, size: int) -> None:
        """Check the free space for an announced body; abort the upload if it is too small.

        Uploads that have been idle for IDLE seconds are aborted first. Raises NoSpaceError.
        """
        while size > await run_io(self._layout.measure_free):
            if not await self._abort_idle():
                await self.abort(upload)
                raise NoSpaceError(f"a body of {size} bytes is announced, and the disk is too full")

    async def commit(
        self,
        upload: UploadSession,
        digest: Digest,
        media_type: str,
        rest: bytes | memoryview = b"",
        adding: AbstractContextManager[None] | None = None,
    ) -> None:
        """Append ``rest``, verify and commit the content within ``adding``.

        The upload ends in any case. Raises DIGEST_INVALID, and the errors of ``write``.
        """
        self.get(upload.repository, upload.id)
        upload.writing = len(rest)
        await self._check_quota(upload)
        del self._uploads[upload.id]
        expected = Descriptor(media_type, digest, upload.offset + len(rest))
        adding = adding or contextlib.nullcontext()
        try:
            await run_locking(self._commit, upload, expected, rest, adding)
        except VerificationError as error:
            detail = {"digest": str(digest)}
            raise DistributionError("DIGEST_INVALID", detail, message=error.message) from None

    def _commit(
        self,
        upload: UploadSession,
        expected: Descriptor,
        rest: bytes | memoryview,
        adding: AbstractContextManager[None],
    ) -> None:
        ingest = self._open_ingest(upload, is_small=True)
        try:
            # The algorithm is chosen before the first byte
            ingest.digest(expected.digest.algorithm)
            if rest:
                ingest.write_at(upload.offset, rest)
            with adding:
                ingest.commit(expected)
        except BaseException:
            ingest.abort()
            raise

    async def abort(self, upload: UploadSession) -> None:
        """Remove the upload and its bytes."""
        if self._uploads.pop(upload.id, None) is not None and upload.ingest is not None:
            await run_io(upload.ingest.abort)

    async def expire(self) -> None:
        """Abort the uploads that have been idle for too long, or are too slow for their age."""
        timestamp = self._clock()
        for upload in list(self._uploads.values()):
            age = timestamp - upload.started
            is_slow = age > self.expiry and upload.offset < age * SLOWEST
            is_idle = upload.touched <= timestamp - self.expiry
            if (is_idle or is_slow) and not upload.lock.locked():
                await self.abort(upload)
        if not self._uploads:
            # An open directory would keep its file system mounted
            self._ingests = None

    async def close(self) -> None:
        """Abort all uploads."""
        for upload in list(self._uploads.values()):
            await self.abort(upload)


def _advance(offset: int, count: int, end: int | None) -> int:
    """Return the offset after ``count`` more bytes. Raises SIZE_INVALID if it is after ``end``."""
    if end is not None and offset + count > end:
        raise build_size_error("the body is longer than Content-Range")
    return offset + count


def build_unknown_error(key: str) -> DistributionError:
    """Return the error of an upload that does not exist, or has ended."""
    return DistributionError("BLOB_UPLOAD_UNKNOWN", {"upload": key[:100]})


def build_size_error(message: str) -> DistributionError:
    """Return the error of a body whose size is not that of its Content-Range."""
    return DistributionError("SIZE_INVALID", message=message)


async def _join(writing: asyncio.Task[None]) -> None:
    """Wait for a write, which a cancellation does not end: its thread reads the buffer."""
    await asyncio.wait([writing])
    writing.result()

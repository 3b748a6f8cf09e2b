"""Uploads in progress: received bytes and expiry. Independent of HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from clowder_aimage.content.store import Ingest
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import NoSpaceError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest

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
    """One blob being received; ``offset`` bytes of it are in the ingest.

    A writer holds ``lock``: a client that retries while its first request is still being read
    waits, and then finds an unexpected offset.
    """

    id: str
    repository: str
    ingest: Ingest
    touched: float
    started: float
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

    def __len__(self) -> int:
        return len(self._uploads) + self._beginning

    async def begin(self, repository: str) -> UploadSession:
        """Begin an upload. Raises DistributionError: TOOMANYREQUESTS."""
        # Counted before anything is awaited: concurrent requests must not exceed the limit
        self._beginning += 1
        try:
            if len(self) > MAX_UPLOADS and not await self._abort_idle():
                raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
            return await self._begin(repository)
        finally:
            self._beginning -= 1

    async def _begin(self, repository: str) -> UploadSession:
        key, timestamp = secrets.token_hex(16), self._clock()
        ingest = await run_locking(self._layout.ingest, f"upload-{key}")
        upload = self._uploads[key] = UploadSession(key, repository, ingest, timestamp, timestamp)
        return upload

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
            raise DistributionError("BLOB_UPLOAD_UNKNOWN", {"upload": key[:100]})
        return upload

    async def write(self, upload: UploadSession, data: bytes | bytearray) -> None:
        """Append ``data``; abort the upload if there is no space for it.

        Raises NoSpaceError, and DistributionError: TOOMANYREQUESTS beyond the quota.
        """
        self.get(upload.repository, upload.id)
        upload.writing = len(data)
        try:
            await self._check_quota(upload)
            await run_io(upload.ingest.write_at, upload.offset, data)
        except NoSpaceError:
            await self.abort(upload)
            raise
        finally:
            upload.writing = 0
        upload.offset += len(data)
        upload.touched = self._clock()

    async def _check_quota(self, upload: UploadSession) -> None:
        sessions = self._uploads.values()
        while (
            self._quota
            and sum(session.offset + session.writing for session in sessions) > self._quota
        ):
            if not await self._abort_idle():
                await self.abort(upload)
                message = f"unfinished uploads may have {self._quota} bytes together"
                headers = {"Retry-After": str(int(IDLE))}
                raise DistributionError("TOOMANYREQUESTS", message=message, headers=headers)

    async def check_space(self, upload: UploadSession, size: int) -> None:
        """Check the free space for an announced body; abort the upload if it is too small.

        Uploads that have been idle for IDLE seconds are aborted first. Raises NoSpaceError.
        """
        while size > await run_io(self._layout.measure_free):
            if not await self._abort_idle():
                await self.abort(upload)
                raise NoSpaceError(f"a body of {size} bytes is announced, and the disk is too full")

    async def commit(self, upload: UploadSession, digest: Digest, media_type: str) -> None:
        """Verify and commit the content; the upload ends in any case. Raises DIGEST_INVALID."""
        self.get(upload.repository, upload.id)
        del self._uploads[upload.id]
        expected = Descriptor(media_type, digest, upload.offset)
        try:
            await run_locking(upload.ingest.commit, expected)
        except VerificationError as error:
            detail = {"digest": str(digest)}
            raise DistributionError("DIGEST_INVALID", detail, message=error.message) from None

    async def abort(self, upload: UploadSession) -> None:
        """Remove the upload and its bytes."""
        if self._uploads.pop(upload.id, None) is not None:
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

    async def close(self) -> None:
        """Abort all uploads."""
        for upload in list(self._uploads.values()):
            await self.abort(upload)

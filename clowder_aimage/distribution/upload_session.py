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

EXPIRY = 3600.0  # seconds without a byte after which an upload is aborted
MAX_UPLOADS = 256  # each holds a file open
IDLE = 60.0  # seconds without a byte after which a new upload may replace one
SLOWEST = 1024  # bytes per second, below which an upload that is older than its expiry is aborted


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
    begun: float
    offset: int = 0
    writing: int = 0  # bytes, which count for the quota before they are awaited
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def location(self) -> str:
        """The path at which the upload continues."""
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
        expiry: The seconds without a byte after which an upload is aborted.
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
        self._beginning += 1  # counted before anything is awaited
        try:
            if len(self) > MAX_UPLOADS and not await self._make_room():
                raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
            return await self._begin(repository)
        finally:
            self._beginning -= 1

    async def _begin(self, repository: str) -> UploadSession:
        key, now = secrets.token_hex(16), self._clock()
        ingest = await run_locking(self._layout.ingest, f"upload-{key}")
        upload = self._uploads[key] = UploadSession(key, repository, ingest, now, now)
        return upload

    async def _make_room(self) -> bool:
        """Abort the upload that has been idle for longest, if that is at least IDLE seconds."""
        idle = [one for one in self._uploads.values() if not one.lock.locked()]
        oldest = min(idle, key=lambda one: one.touched, default=None)
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
        """Append ``data``; give up the upload if there is no space for it.

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
        all_of_them = self._uploads.values()
        while self._quota and sum(one.offset + one.writing for one in all_of_them) > self._quota:
            if not await self._make_room():
                await self.abort(upload)
                message = f"unfinished uploads may have {self._quota} bytes together"
                headers = {"Retry-After": str(int(IDLE))}
                raise DistributionError("TOOMANYREQUESTS", message=message, headers=headers)

    async def check_space(self, upload: UploadSession, size: int) -> None:
        """Check whether an announced body fits on the disk; if not, give up the upload.

        Uploads that have been idle for IDLE seconds are aborted first. Raises NoSpaceError.
        """
        while size > await run_io(self._layout.free):
            if not await self._make_room():
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
        now = self._clock()
        for upload in list(self._uploads.values()):
            age = now - upload.begun
            is_slow = age > self.expiry and upload.offset < age * SLOWEST
            is_idle = upload.touched <= now - self.expiry
            if (is_idle or is_slow) and not upload.lock.locked():
                await self.abort(upload)

    async def close(self) -> None:
        """Abort all uploads."""
        for upload in list(self._uploads.values()):
            await self.abort(upload)

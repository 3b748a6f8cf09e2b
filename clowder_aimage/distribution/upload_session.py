"""Uploads in progress: received bytes and expiry. Independent of HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from clowder_aimage.content.store import Ingest
from clowder_aimage.distribution.distribution_error import DistributionError
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest

EXPIRY = 3600.0  # seconds without a byte after which an upload is aborted
MAX_UPLOADS = 256  # each holds a file open
IDLE = 60.0  # seconds without a byte after which a new upload may replace one


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
    offset: int = 0
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
    """All uploads of a server; they end with it."""

    def __init__(self, layout: ImageLayout, clock: Callable[[], float], expiry: float) -> None:
        self._layout, self._clock, self.expiry = layout, clock, expiry
        self._uploads: dict[str, UploadSession] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    async def begin(self, repository: str) -> UploadSession:
        """Begin an upload. Raises DistributionError: TOOMANYREQUESTS."""
        if len(self._uploads) >= MAX_UPLOADS and not await self._make_room():
            raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
        key = secrets.token_hex(16)
        ingest = await run_locking(self._layout.ingest, f"upload-{key}")
        upload = self._uploads[key] = UploadSession(key, repository, ingest, self._clock())
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
        """Append ``data``."""
        self.get(upload.repository, upload.id)
        await run_io(upload.ingest.write_at, upload.offset, data)
        upload.offset += len(data)
        upload.touched = self._clock()

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
        """Abort the uploads that have been idle for too long."""
        deadline = self._clock() - self.expiry
        for upload in list(self._uploads.values()):
            if upload.touched <= deadline and not upload.lock.locked():
                await self.abort(upload)

    async def close(self) -> None:
        """Abort all uploads."""
        for upload in list(self._uploads.values()):
            await self.abort(upload)

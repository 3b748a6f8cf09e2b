"""Uploads of processes that serve a store together: any of them continues one of another.

An upload is its ingest, whose name has its id, and the id has the repository. A request locks the
file, so that no state is anywhere else: an upload survives the process that began it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import AsyncIterator

from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.upload_session import (
    IDLE,
    MAX_UPLOADS,
    PREFIX,
    UploadSession,
    UploadSessions,
    build_unknown_error,
)
from clowder_aimage.engine.executor import LOCK_TIMEOUT, run_io, run_locking
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout.shared_ingest import SharedIngest, list_shared, remove_shared
from clowder_aimage.oci import Digest

_ID = re.compile(r"[0-9a-f]{48}")
# Seconds between two attempts to lock an upload
_INTERVAL = 0.02


class SharedUploads(UploadSessions):
    """The uploads of all processes. In memory are those that this process hashes."""

    def __len__(self) -> int:
        return len(list_shared(self._layout.root, PREFIX))

    async def begin(self, repository: str) -> UploadSession:
        key, timestamp = secrets.token_hex(16) + _compute_suffix(repository), self._clock()
        while (ingest := await run_locking(self._create, key)) is None:
            if not await self._abort_idle():
                raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
        upload = UploadSession(key, repository, timestamp, timestamp, ingest)
        self._uploads[key] = upload
        return upload

    def _create(self, key: str) -> SharedIngest | None:
        """Create the ingest of an upload; return None if there are too many."""
        if len(self) >= MAX_UPLOADS:
            return None
        return SharedIngest(self._layout.root, PREFIX + key, is_new=True)

    def suspend(self, upload: UploadSession) -> None:
        ingest = _get_ingest(upload)
        ingest.release()
        # Another process, which will have the bytes, need not tell this one about the end
        if not upload.offset and self._uploads.pop(upload.id, None) is not None:
            ingest.close()

    async def _abort_idle(self) -> bool:
        latest = time.time() - IDLE
        return await run_io(remove_shared, self._layout.root, PREFIX, latest, most=1) > 0

    async def find(self, repository: str, key: str) -> UploadSession:
        while True:
            upload = await self._locate(repository, key)
            if upload.lock.locked():
                return upload
            await self._refresh(upload)
            # Another request may have left it to other processes meanwhile
            if self._uploads.get(key) is upload:
                return upload

    async def _locate(self, repository: str, key: str) -> UploadSession:
        """Return an upload that this process knows, or open one of another process."""
        if key in self._uploads:
            return self.get(repository, key)
        if not _ID.fullmatch(key) or not key.endswith(_compute_suffix(repository)):
            raise build_unknown_error(key)
        try:
            ingest = await run_io(SharedIngest, self._layout.root, PREFIX + key, is_new=False)
        except NotFoundError:
            raise build_unknown_error(key) from None
        if len(self._uploads) >= MAX_UPLOADS:
            await self._forget_ended()
        timestamp = self._clock()
        upload = UploadSession(key, repository, timestamp, timestamp, ingest)
        if self._uploads.setdefault(key, upload) is not upload:
            # Another request has opened it meanwhile
            ingest.close()
        return self._uploads[key]

    @contextlib.asynccontextmanager
    async def hold(self, repository: str, key: str) -> AsyncIterator[UploadSession]:
        while True:
            upload = await self._locate(repository, key)
            async with upload.lock:
                if self._uploads.get(key) is not upload:
                    continue
                await self._acquire(upload)
                try:
                    yield upload
                finally:
                    self.suspend(upload)
                return

    async def _acquire(self, upload: UploadSession) -> None:
        """Lock an upload. Raises BLOB_UPLOAD_UNKNOWN, and TOOMANYREQUESTS after a while."""
        deadline = self._clock() + LOCK_TIMEOUT
        while True:
            try:
                status = await run_locking(_get_ingest(upload).acquire)
                break
            except BlockingIOError:
                if self._clock() > deadline:
                    message = "another request writes the upload"
                    raise DistributionError("TOOMANYREQUESTS", message=message) from None
            await asyncio.sleep(_INTERVAL)
        self._update(upload, status)
        self.get(upload.repository, upload.id)

    async def _refresh(self, upload: UploadSession) -> None:
        self._update(upload, await run_io(_get_ingest(upload).read_status))

    def _update(self, upload: UploadSession, status: os.stat_result | None) -> None:
        """Update an upload by the status of its file; None ends it."""
        if status is not None:
            upload.offset = status.st_size
            upload.touched = self._clock() - max(0.0, time.time() - status.st_mtime)
        elif self._uploads.pop(upload.id, None) is not None:
            _get_ingest(upload).close()

    async def _count_bytes(self) -> int:
        found = await run_io(list_shared, self._layout.root, PREFIX)
        writing = sum(upload.writing for upload in self._uploads.values())
        return sum(status.st_size for status in found.values()) + writing

    async def _forget_ended(self) -> None:
        """Forget the uploads that other processes have ended."""
        for upload in list(self._uploads.values()):
            if not upload.lock.locked():
                await self._refresh(upload)

    async def expire(self) -> None:
        await self._forget_ended()
        await super().expire()
        # Those of processes that have ended
        await run_io(remove_shared, self._layout.root, PREFIX, time.time() - self.expiry)


def _get_ingest(upload: UploadSession) -> SharedIngest:
    assert isinstance(upload.ingest, SharedIngest)  # noqa: S101 - all of them begin with one
    return upload.ingest


def _compute_suffix(repository: str) -> str:
    return Digest.of(repository.encode()).encoded[:16]

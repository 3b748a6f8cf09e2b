"""Group commit: blobs are made durable together, while others arrive.

A disk takes as long to synchronise one small file as a hundred. Verified blobs are therefore kept
locked in their ingests until the file system is synchronised once and all are renamed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Protocol

from clowder_aimage.content.file_system import sync_file_system
from clowder_aimage.layout.ingest_directory import IngestDirectory, open_ingests
from clowder_aimage.layout.lock import PRIVATE, translate_store_errors
from clowder_aimage.oci import Digest

# Each pending blob is an open file; as many more are being made durable.
_MAX_BLOBS = 64
_MAX_AGE = 1.0  # seconds
# Bytes that a crash may lose
_MAX_SIZE = 32 * 1024 * 1024


class PendingCommit(Protocol):
    """A verified blob in its ingest."""

    is_large: bool

    def synchronise(self) -> None: ...

    def rename(self) -> None: ...

    def give_up(self) -> None: ...


class GroupCommit:
    """The pending commits of the store at ``root``.

    Thread-safe. ``users`` counts the copies that share it; ``failure`` applies to all of them.
    """

    def __init__(self, root: Path) -> None:
        self.users = 0
        self.failure: BaseException | None = None
        self._root = root
        self._is_closed = False
        self._lock = threading.Lock()
        self._waiting: dict[Digest, PendingCommit] = {}
        self._settling: dict[Digest, PendingCommit] = {}
        # The bytes of the pending blobs, and the time of the oldest.
        self._size, self._since = 0, 0.0
        self._settle_lock = threading.Lock()
        self._ingests: IngestDirectory | None = None
        self._has_opened_ingests = False

    def __contains__(self, digest: Digest) -> bool:
        with self._lock:
            return digest in self._waiting or digest in self._settling

    @property
    def is_pending(self) -> bool:
        """Return True if any blob is pending."""
        with self._lock:
            return bool(self._waiting or self._settling)

    def create_ingest(self, name: str) -> int | None:
        """Create a locked file for a small blob; return None if it must be opened by its path.

        The first one always is: that reports what is wrong with the store.
        """
        with self._lock:
            ingests = self._ingests
            is_first, self._has_opened_ingests = not self._has_opened_ingests, True
        if is_first:
            self._ingests = open_ingests(self._root)
        return None if ingests is None else ingests.create(name)

    def add(self, digest: Digest, blob: PendingCommit, size: int) -> None:
        """Add a blob. If a limit is reached, all are committed, while the caller goes on.

        Raises the error of an earlier commit.
        """
        if self.failure is not None:
            raise self.failure
        with self._lock:
            if not self._waiting:
                self._size, self._since = 0, time.monotonic()
            self._waiting[digest] = blob
            self._size += size
            # A process may be waiting for the blob.
            is_old = time.monotonic() - self._since > _MAX_AGE
            is_full = len(self._waiting) >= _MAX_BLOBS or self._size >= _MAX_SIZE or is_old
        if self._is_closed or (is_full and self._settle_lock.locked()):
            self.settle()
        elif is_full:
            try:
                threading.Thread(target=self._settle_behind, name="aimage-commit").start()
            except RuntimeError:
                # The system has no more threads
                self.settle()

    def _settle_behind(self) -> None:
        # Everybody who adds another blob, or ends the batch, gets the error.
        with contextlib.suppress(Exception):
            self.settle()

    def settle_old(self) -> None:
        """Commit the blobs if the oldest is due. Raises the errors of ``settle``."""
        if self._waiting and time.monotonic() - self._since > _MAX_AGE:
            self.settle()

    def close(self) -> None:
        """Commit all, and from now on each added blob at once. Raises the errors of ``settle``."""
        with self._lock:
            # An open directory would keep its file system mounted.
            self._is_closed, self._has_opened_ingests, self._ingests = True, True, None
        self.settle()

    def settle(self) -> None:
        """Commit all pending blobs. Raises StoreError or NoSpaceError."""
        with self._settle_lock:
            with self._lock:
                self._settling, self._waiting = self._waiting, {}
            # Blobs are visible only once their bytes are on disk: sync first, then rename.
            blobs = list(self._settling.values())
            try:
                with translate_store_errors(self._root):
                    _synchronise(self._root, blobs)
                    while blobs:
                        blobs[-1].rename()
                        blobs.pop()
            except BaseException as error:
                self.failure = error
                raise
            finally:
                # The blobs that were not renamed.
                for blob in blobs:
                    blob.give_up()
                with self._lock:
                    self._settling = {}


def _synchronise(root: Path, blobs: list[PendingCommit]) -> None:
    """Make all files durable, with one call for several files if possible."""
    is_done = False
    # The call for the file system may miss errors: before Linux 5.8, all of them
    for blob in blobs:
        if blob.is_large:
            blob.synchronise()
    blobs = [blob for blob in blobs if not blob.is_large]
    if len(blobs) > 1:
        fd = os.open(root / PRIVATE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            is_done = sync_file_system(fd)
        finally:
            os.close(fd)
    for blob in [] if is_done else blobs:
        blob.synchronise()

"""Small blobs made durable together.

A disk takes as long to synchronise one small file as a hundred. So verified small blobs wait in
their ingests, locked, until there are enough of them; then the file system is synchronised once,
and all get their names.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from clowder_aimage.errors import AImageError
from clowder_aimage.layout.lock import PRIVATE, store_errors
from clowder_aimage.oci import Digest

_MOST = 128  # files that are open for it
_LONGEST = 1.0  # seconds
_LARGEST = 32 * 1024 * 1024  # bytes that a crash may cost


class PendingCommit(Protocol):
    """A verified blob in its ingest."""

    def synchronise(self) -> None:
        """Make its bytes durable by itself. Raises OSError."""
        ...

    def rename(self) -> None:
        """Give it its name. Raises OSError."""
        ...

    def give_up(self) -> None:
        """It cannot be published."""
        ...


class GroupCommit:
    """Blobs of the store at ``root`` that wait. Threads may share it, and several copies: ``users``
    counts them, ``failure`` is for all of them."""

    def __init__(self, root: Path) -> None:
        self.users = 0
        self.failure: AImageError | None = None
        self._root = root
        self._is_closed = False
        self._lock = threading.Lock()
        self._waiting: dict[Digest, tuple[PendingCommit, int]] = {}
        self._settling: dict[Digest, tuple[PendingCommit, int]] = {}
        self._since = 0.0  # when the first of them came
        self._one = threading.Lock()  # one settles at a time

    def __contains__(self, digest: Digest) -> bool:
        with self._lock:
            return digest in self._waiting or digest in self._settling

    @property
    def has_some(self) -> bool:
        """Whether any wait."""
        with self._lock:
            return bool(self._waiting or self._settling)

    def add(self, digest: Digest, blob: PendingCommit, size: int) -> None:
        """Let a blob wait. Raises StoreError or NoSpaceError, for any that waited."""
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting[digest] = blob, size
            total = sum(size for _, size in self._waiting.values())
            is_full = len(self._waiting) >= _MOST or total >= _LARGEST
        if is_full or self._is_closed:
            self.settle()

    def settle_old(self) -> None:
        """Publish what waits, if the first of it has waited for long. Raises as ``settle``."""
        if self._waiting and time.monotonic() - self._since > _LONGEST:
            self.settle()

    def close(self) -> None:
        """Let nothing wait any more: who comes late, as a connection that was left behind, is
        published at once. Raises as ``settle``."""
        with self._lock:
            self._is_closed = True
        self.settle()

    def settle(self) -> None:
        """Publish all that waits. Raises StoreError or NoSpaceError."""
        with self._one:
            with self._lock:
                self._settling, self._waiting = self._waiting, {}
            blobs = [blob for blob, _ in self._settling.values()]
            try:
                with store_errors(self._root):
                    if len(blobs) > 1:
                        synchronise_all(self._root, blobs)
                    else:
                        for blob in blobs:
                            blob.synchronise()
                    while blobs:
                        blobs[-1].rename()
                        blobs.pop()
            except AImageError as error:
                self.failure = error
                raise
            finally:
                for blob in blobs:  # those that could not
                    blob.give_up()
                with self._lock:
                    self._settling = {}


def synchronise_all(root: Path, blobs: list[PendingCommit]) -> None:
    """Make the bytes of all files durable, by one call where there is one. Raises OSError."""
    syncfs = _syncfs()
    if syncfs is None:
        for blob in blobs:
            blob.synchronise()
        return
    fd = os.open(root / PRIVATE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if syncfs(fd) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(root))
    finally:
        os.close(fd)


def _syncfs() -> Callable[[int], int] | None:
    """syncfs(2), which Linux has."""
    try:
        return ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None

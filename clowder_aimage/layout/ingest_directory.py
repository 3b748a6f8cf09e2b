"""The directory of ingests, open for the many new ones of a batch.

Opening one by its path takes a dozen calls of the system: the version of the store, links on the
way, the type of its file system, and locks, which are the same for all of them.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from clowder_aimage.content.mount import find_mount
from clowder_aimage.layout.lock import (
    PRIVATE,
    SHARED_MODE,
    is_shared,
    make_directory,
    supports_locks,
)

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class IngestDirectory:
    """An open directory of ingests. The last reference closes it."""

    def __init__(self, root: Path) -> None:
        """Open the directory of the store at ``root``. Raises OSError, StoreError."""
        directory = make_directory(root, PRIVATE, "ingest")
        self._path = str(directory)
        self._fd = os.open(directory, _FLAGS)
        self._is_shared = is_shared(os.fstat(self._fd))

    def __del__(self) -> None:
        # It has no descriptor if it could not be opened.
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def create(self, name: str) -> int | None:
        """Create and lock a file, and return its descriptor.

        Return None if the file exists, or must be opened by its path: it may be another process's.
        """
        try:
            fd = os.open(name, _NEW, 0o600, dir_fd=self._fd)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have taken it before it was locked, or moved the directory.
            status, named = os.fstat(fd), os.lstat(f"{self._path}/{name}")
            if os.path.samestat(status, named) and named.st_nlink == 1:
                if self._is_shared:
                    os.fchmod(fd, SHARED_MODE)
                return fd
        except OSError:
            pass
        os.close(fd)
        return None


def open_ingests(root: Path) -> IngestDirectory | None:
    """Open the ingests of a store on a local file system with locks, else return None."""
    mount = find_mount(root)
    if mount.is_network or mount.has_local_locks or not supports_locks(root):
        return None
    try:
        return IngestDirectory(root)
    except OSError:
        return None

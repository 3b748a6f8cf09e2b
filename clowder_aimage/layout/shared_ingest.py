"""Ingests of processes that serve a store together: each writes while it holds the lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout.ingest import FileIngest
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_single_writer,
    lock_file,
    make_directory,
    share,
)

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_KIND = "ingest"


class SharedIngest(FileIngest):
    """An ingest that several processes append to in turn; its bytes are always contiguous.

    What others have written is hashed from the file. Between two writes it is not locked, and a
    collection removes it as one of a process that has ended: long after its last write.
    """

    def __init__(self, root: Path, key: str, *, is_new: bool) -> None:
        """Create an ingest, or open one of another process.

        Raises NotFoundError: it has ended; StoreError, NoSpaceError.
        """
        self._is_new = is_new
        super().__init__(root, key)

    def _build_name(self, key: str) -> str:
        return key

    def _open(self) -> int:
        check_single_writer(self._root)
        if not self._is_new:
            try:
                return os.open(self._path, _FLAGS)
            except FileNotFoundError:
                raise NotFoundError("the ingest has ended") from None
        directory = os.path.dirname(self._path)
        try:
            fd = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            make_directory(self._root, PRIVATE, _KIND)
            fd = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        share(fd, directory)
        return fd

    def _continue(self, size: int) -> None:
        self._set_size(size)

    def _set_size(self, size: int) -> None:
        with self._lock:
            self._ranges = [(0, size)] if size else []

    def read_status(self) -> os.stat_result | None:
        """Return the status of the file, or None if the ingest has ended."""
        with contextlib.suppress(OSError):
            status = os.fstat(self._fd)
            if os.path.samestat(status, os.lstat(self._path)):
                return status
        return None

    def acquire(self) -> os.stat_result | None:
        """Lock the ingest, and continue after the bytes of others.

        Return the status of the file, or None if the ingest has ended. Raises BlockingIOError while
        another process holds it; StoreError.
        """
        if self._fd < 0:
            return None
        lock_file(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self._root)
        status = self.read_status()
        if status is None:
            self.close()
        else:
            self._set_size(status.st_size)
        return status

    def release(self) -> None:
        """Unlock the ingest, unless it has ended."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def abort(self) -> None:
        self.remove()

    def remove(self) -> bool:
        """Remove the ingest; return False if it has ended, or another process is writing it."""
        try:
            if self.acquire() is None:
                return False
            super().abort()
        except BlockingIOError:
            self.close()
            return False
        return True


def list_shared(root: Path, prefix: str) -> dict[str, os.stat_result]:
    """Return the ingests whose keys begin with ``prefix``, with the status of their files."""
    found = {}
    directory = os.path.join(root, PRIVATE, _KIND)
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            # Names with a dot are those of other ingests
            if entry.name.startswith(prefix) and "." not in entry.name:
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def remove_shared(root: Path, prefix: str, latest: float, *, most: int | None = None) -> int:
    """Remove ingests that were last written before ``latest``, and that no process holds.

    The oldest come first. Return the number of those removed, at ``most`` that many.
    """
    found = sorted(list_shared(root, prefix).items(), key=lambda item: item[1].st_mtime)
    count = 0
    for key, status in found:
        if status.st_mtime > latest or count == most:
            break
        with contextlib.suppress(NotFoundError):
            count += SharedIngest(root, key, is_new=False).remove()
    return count

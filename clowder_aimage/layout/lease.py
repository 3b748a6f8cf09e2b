"""Leases protect content that a running process needs from collection.

A lease is a file in ``.aimage/lease`` that lists digests, locked by its process. Digests are added
under the shared collection lock: a running collection ends first, and a blob that exists afterwards
is kept until the lease ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from clowder_aimage.content.file_system import is_locked, lock
from clowder_aimage.content.open_directory import unlink
from clowder_aimage.content.store import Lease
from clowder_aimage.errors import AImageError, NoSpaceError, StoreBusyError, StoreError
from clowder_aimage.layout.lock import (
    PRIVATE,
    READ_ONLY,
    check_own,
    close_unwritten,
    hold_lock,
    make_directory,
    open_shared,
    supports_locks,
    translate_store_errors,
)
from clowder_aimage.oci import Digest

COLLECTION = "gc.lock"
_DIRECTORY = "lease"
# Seconds that a lease is valid on file systems without locks
_MAX_AGE = 7 * 86400.0
_MAX_SIZE = 256 * 1024 * 1024


class FileLease(Lease):
    """A lease on digests until it is closed; in a read-only store it has no effect."""

    def __init__(self, root: Path, digests: Iterable[Digest] = ()) -> None:
        self._root = root
        self._path = root / PRIVATE / _DIRECTORY / os.urandom(12).hex()
        self._fd = -1
        self._held: set[Digest] = set()
        self._lock = threading.Lock()
        self.add(*digests)

    def add(self, *digests: Digest) -> None:
        """Add digests. Check their existence only afterwards. Raises StoreError."""
        with self._lock:
            self._add(set(digests) - self._held)

    def _add(self, new: set[Digest]) -> None:
        if not new:
            return
        try:
            with hold_lock(self._root, COLLECTION, shared=True), translate_store_errors(self._root):
                if self._fd < 0:
                    make_directory(self._root, PRIVATE, _DIRECTORY)
                    self._fd = open_shared(self._path)
                    lock(self._fd, fcntl.LOCK_EX)
                data = "".join(f"\n{digest}" for digest in new).encode() + b"\n"
                while data:
                    data = data[os.write(self._fd, data) :]
            self._held |= new
        except NoSpaceError:
            # A full disk fails later writes, but reads may continue.
            pass
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) not in READ_ONLY:
                raise

    def close(self) -> None:
        """End the lease."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                unlink(self._path)
            close_unwritten(fd)

    def __exit__(self, *_: object) -> None:
        self.close()


def read_leases(root: Path, *, remove: bool) -> set[Digest]:
    """Return the digests leased by running processes; ``remove`` the leases of ended ones.

    Raises StoreError: a lease cannot be read, so that no content may be collected.
    """
    digests: set[Digest] = set()
    if not Path(check_own(root, _DIRECTORY)).is_dir():
        return digests
    can_lock = supports_locks(root)
    for path in sorted((root / PRIVATE / _DIRECTORY).glob("*")):
        with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb", buffering=0) as file:
                is_old = time.time() - os.fstat(fd).st_mtime > _MAX_AGE
                # Without locks, the end of a process is not visible.
                if is_locked(fd) if can_lock else not is_old:
                    digests |= set(_parse_digests(_read(file, root)))
                elif remove:
                    # One that remains is unlocked, and protects nothing.
                    with contextlib.suppress(OSError):
                        unlink(path)
    return digests


def _read(file: io.FileIO, root: Path) -> bytes:
    try:
        return file.read(_MAX_SIZE) or b""
    except PermissionError:
        # On SMB a locked file cannot be read
        raise StoreBusyError(
            f"the store {root} is in use, and its file system does not tell what is needed",
            hint="try again when other commands have ended",
        ) from None


def _parse_digests(raw: bytes) -> Iterator[Digest]:
    for line in raw.decode("ascii", "replace").split("\n"):
        with contextlib.suppress(AImageError):
            yield Digest.parse(line)

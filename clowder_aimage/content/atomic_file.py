"""Atomic file writes.

Data is written to a temporary file beside the final one, which is synced and renamed. It is locked
(flock) while it is open, which distinguishes it from leftovers of killed processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def atomic_file(
    path: Path,
    *,
    mode: int = 0o666,
    durable: bool = True,
    directory: Path | None = None,
    prepare: Callable[[int], None] | None = None,
    removes_leftovers: bool = False,
) -> Iterator[BinaryIO]:
    """Open an unbuffered file that is renamed to ``path`` when the block ends without an error.

    On an error the temporary file is removed and an old file is unchanged. Raises OSError.

    Args:
        path: The final path. The caller resolves links.
        mode: The permissions, less the umask.
        durable: Sync the file, and the directory of ``path``.
        directory: The directory of the temporary file, on the same file system as ``path``.
        prepare: Called with the descriptor of the new file, before any byte is written.
        removes_leftovers: Remove the temporary files of killed processes.
    """
    temporary, fd = _create(path, directory, mode)
    with os.fdopen(fd, "wb", buffering=0) as file:
        try:
            if removes_leftovers:
                remove_leftovers(temporary, temporary_prefix(path))
            if prepare is not None:
                prepare(fd)
            yield file
            if durable:
                os.fsync(fd)
            temporary.replace(path)  # while it is locked
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    if durable:
        sync_directory(path.parent)


def _create(path: Path, directory: Path | None, mode: int) -> tuple[Path, int]:
    """Return a new temporary file, locked while it is open."""
    while True:
        temporary = temporary_path(path, directory)
        fd = os.open(temporary, _NEW, mode)
        flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)  # removed as a leftover before it was locked


def write_file(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write ``data`` to ``path`` atomically. Raises OSError."""
    with atomic_file(path, mode=mode, durable=durable) as file:
        write_all(file.fileno(), data)


def write_all(fd: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of ``data`` at ``offset``, or at the current position. Raises OSError."""
    view = memoryview(data)
    while view:
        if offset is None:
            count = os.write(fd, view)
        else:
            count = os.pwrite(fd, view, offset)
            offset += count
        view = view[count:]


def temporary_path(path: Path, directory: Path | None = None, infix: str = "") -> Path:
    """Return a new path for a temporary file of ``path``, in ``directory`` or beside ``path``."""
    name = f"{temporary_prefix(path, infix)}{secrets.token_hex(8)}"
    return directory / name if directory else path.with_name(name)


def temporary_prefix(path: Path, infix: str = "") -> str:
    """Return the prefix of the names of temporary files of ``path``."""
    return f".{path.name[:100]}.{infix}"


def is_temporary(name: str, prefix: str) -> bool:
    """Return whether ``name`` is the name of a temporary file with ``prefix``."""
    return re.fullmatch(re.escape(prefix) + "[0-9a-f]{16}", name) is not None


def remove_leftovers(
    temporary: Path, prefix: str, remove: Callable[[Path], None] = Path.unlink
) -> None:
    """Remove unlocked temporary files of killed processes beside the locked ``temporary``.

    Do nothing on file systems without locks, and ignore errors.
    """
    with contextlib.suppress(OSError):
        if not is_locked(temporary):
            return
        for path in list(temporary.parent.iterdir()):
            if is_temporary(path.name, prefix):
                with contextlib.suppress(OSError):
                    _remove_unlocked(path, remove)


def _remove_unlocked(path: Path, remove: Callable[[Path], None]) -> None:
    fd = os.open(path, _OPEN)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(path)
    finally:
        os.close(fd)


def flock(fd: int, operation: int) -> None:
    """Lock an open file if the file system has locks. Raises BlockingIOError with LOCK_NB."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def is_locked(path: str | Path) -> bool:
    """Return whether a file is locked by any process, this one included. Raises OSError."""
    fd = os.open(path, _OPEN)
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def sync_directory(path: str | Path) -> None:
    """Make renames into a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Atomic file writes.

Data is written to a temporary file beside the final one. Then it is synced and renamed. It is
locked (flock) while it is open: leftovers of killed processes are not locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.content.file_system import is_locked, lock, sync_file
from clowder_aimage.content.open_directory import OpenDirectory

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def open_atomic(
    path: Path,
    *,
    mode: int = 0o666,
    durable: bool = True,
    directory: Path | None = None,
    prepare: Callable[[int], None] | None = None,
    finish: Callable[[int], None] | None = None,
    removes_leftovers: bool = False,
) -> Iterator[BinaryIO]:
    """Open an unbuffered file that is renamed to ``path`` when the block ends without an error.

    On an error the temporary file is removed and an old file is unchanged. Raises OSError, also if
    another program has replaced the temporary file.

    Args:
        path: The final path; a link is replaced. ``open_directory.resolve`` follows it.
        mode: The permissions, less the umask.
        durable: Sync the file, and the directory of ``path``.
        directory: The directory of the temporary file, on the same file system as ``path``.
        prepare: Called with the descriptor of the new file, before any byte is written.
        finish: Called with it before the rename, after the sync of the file.
        removes_leftovers: Remove the temporary files of killed processes.
    """
    with contextlib.ExitStack() as stack:
        final = stack.enter_context(OpenDirectory(path.parent))
        temporary_directory = stack.enter_context(OpenDirectory(directory)) if directory else final
        temporary, fd = _create(temporary_directory, path, mode)
        with os.fdopen(fd, "wb", buffering=0) as file:
            try:
                if removes_leftovers:
                    remove_leftovers(temporary_directory, temporary, build_temporary_prefix(path))
                if prepare is not None:
                    prepare(fd)
                yield file
                if durable:
                    sync_file(fd, path)
                if finish is not None:
                    finish(fd)
                # Renamed while it is locked: other processes remove unlocked temporary files.
                temporary_directory.rename(os.fstat(fd), temporary, path.name, final)
            except BaseException:
                temporary_directory.remove(temporary)
                raise
        # Without a sync of the directory, the rename itself may be lost in a crash.
        if durable:
            final.sync()


def _create(directory: OpenDirectory, path: Path, mode: int) -> tuple[str, int]:
    """Return the name of a new temporary file, and its descriptor, locked while it is open."""
    while True:
        temporary = build_temporary_name(path)
        fd = directory.create(temporary, mode)
        lock(fd, fcntl.LOCK_EX)
        # Not by the count of links, which FUSE may leave at zero
        with contextlib.suppress(FileNotFoundError):
            directory.stat(temporary)
            return temporary, fd
        # Another process removed the file as a leftover before it was locked.
        os.close(fd)


def write_file(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write ``data`` to ``path`` atomically. Raises OSError."""
    with open_atomic(path, mode=mode, durable=durable) as file:
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


def build_temporary_name(path: Path, infix: str = "") -> str:
    """Return a new name for a temporary file of ``path``."""
    return f"{build_temporary_prefix(path, infix)}{os.urandom(8).hex()}"


def build_temporary_prefix(path: Path, infix: str = "") -> str:
    """Return the prefix of the names of temporary files of ``path``."""
    return f".{path.name[:100]}.{infix}"


def is_temporary(name: str, prefix: str) -> bool:
    """Return True if ``name`` is the name of a temporary file with ``prefix``."""
    return re.fullmatch(re.escape(prefix) + "[0-9a-f]{16}", name) is not None


def remove_leftovers(
    directory: OpenDirectory,
    temporary: str,
    prefix: str,
    remove: Callable[[OpenDirectory, str], None] = OpenDirectory.remove,
) -> None:
    """Remove unlocked temporary files of killed processes beside the locked ``temporary``.

    Do nothing on file systems without locks, and ignore errors.
    """
    with contextlib.suppress(OSError), directory.open_to_lock(temporary) as fd:
        names = directory.list_names() if is_locked(fd) else []
    for name in names:
        if is_temporary(name, prefix):
            with contextlib.suppress(OSError), directory.open_to_lock(name) as fd:
                # Removed while it is locked: its name may be new
                if not is_locked(fd):
                    remove(directory, name)


def sync_directory(path: str | Path) -> None:
    """Make renames into a directory durable. Raises OSError."""
    with OpenDirectory(path) as directory:
        directory.sync()

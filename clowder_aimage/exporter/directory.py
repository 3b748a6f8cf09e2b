"""Output directory of an export, created atomically, and the files in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from clowder_aimage.content.atomic_file import (
    DISK_FULL,
    build_temporary_name,
    build_temporary_prefix,
    is_temporary,
    remove_leftovers,
)
from clowder_aimage.content.file_system import (
    ADVICE,
    lock,
    sync_directory,
    sync_file,
    sync_file_system,
)
from clowder_aimage.content.open_directory import READ, OpenDirectory, resolve
from clowder_aimage.errors import NoSpaceError, StoreError, UsageError

# Modes before the umask is applied.
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
_INFIX = "export-"
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
# Bytes of a file that is synced right after it is written.
_LARGE = 16 * 1024 * 1024
# linux/fs.h: _IOW(0x94, 9, int).
_FICLONE = 0x40049409


@contextmanager
def new_directory(path: Path) -> Iterator[OpenDirectory]:
    """Yield a new directory to fill; it appears at ``path`` only if the block succeeds.

    A missing directory is filled with a temporary name and renamed. An existing empty directory is
    filled in a temporary subdirectory, and its files are moved up. All files are durable before
    that.

    Raises:
        UsageError: ``path`` is a file, a directory that is not empty, or has no parent.
        NoSpaceError, StoreError: It cannot be written.
    """
    # All files are created below descriptors of directories, so another user with write access to
    # the parent cannot redirect them by links. An existing directory is not replaced, since it may
    # be a mount or the working directory of a process.
    with contextlib.ExitStack() as stack:
        with translate_errors(path):
            final = resolve(path)
            exists = os.path.lexists(final)
            _check(path, final, exists)
            parent = stack.enter_context(OpenDirectory(final if exists else final.parent))
            temporary = build_temporary_name(final, _INFIX)
            new = stack.enter_context(parent.make_new(temporary, DIRECTORY_MODE))
        try:
            with translate_errors(path):
                lock(new.fd, fcntl.LOCK_EX)
            prefix = build_temporary_prefix(final, _INFIX)
            remove_leftovers(parent, temporary, prefix, OpenDirectory.remove_tree)
            yield new
            with translate_errors(path):
                _sync(new)
                try:
                    if exists:
                        _move_up(parent, new)
                    else:
                        parent.rename(os.fstat(new.fd), temporary, final.name)
                except OSError as error:
                    if error.errno in _OCCUPIED:
                        # Another process created it in the meantime.
                        raise _build_occupied_error(path) from error
                    raise
        except BaseException:
            new.clear()
            raise
        finally:
            parent.remove_tree(temporary)
        with translate_errors(path):
            parent.sync()


def is_folding(directory: OpenDirectory) -> bool:
    """Return True if the file system of a new directory is case-insensitive."""
    # Its temporary name has letters, so the swapped name differs on other file systems.
    return directory.path.with_name(directory.path.name.swapcase()).exists()


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Convert an OSError on output to a NoSpaceError or a StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise NoSpaceError(
                f"no space left while writing {path}; incomplete files were removed",
                hint="free some space, or export to another disk",
            ) from error
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}", hint=ADVICE.get(error.errno or 0)
        ) from error


def _check(path: Path, final: Path, exists: bool) -> None:
    if not exists:
        if not final.parent.is_dir():
            raise UsageError(f"cannot create {path}: no such directory: {path.parent}")
        return
    if not final.is_dir():
        raise UsageError(f"{path} is a file", hint="pass a directory that does not exist yet")
    prefix = build_temporary_prefix(final, _INFIX)
    for entry in final.iterdir():
        # Temporary directories are those of running or killed processes.
        is_temporary_name = is_temporary(entry.name, prefix)
        if not is_temporary_name or entry.is_symlink() or not entry.is_dir():
            raise _build_occupied_error(path)


def _build_occupied_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not empty", hint="pass a directory that is empty or does not exist yet"
    )


def _sync(root: OpenDirectory) -> None:
    """Make all files below a directory durable, together if possible. Raises OSError."""
    if sync_file_system(root.fd):
        return
    for _, _, names, fd in os.fwalk(dir_fd=root.fd, follow_symlinks=False):
        for name in names:
            if not stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                with os.fdopen(os.open(name, READ, dir_fd=fd), "rb", 0) as file:
                    sync_file(file.fileno(), root.path)
        sync_directory(fd, root.path)


def _move_up(final: OpenDirectory, temporary: OpenDirectory) -> None:
    """Move the contents of ``temporary`` into ``final``, its parent; undo it on errors."""
    if final.list_names() != [temporary.path.name]:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    moved: list[str] = []
    try:
        for name in temporary.list_names():
            moved.append(name)
            temporary.move(name, name, final)
    except BaseException:
        for name in moved:
            with contextlib.suppress(OSError):
                final.move(name, name, temporary)
        raise


@contextmanager
def new_file(root: OpenDirectory, name: str, mode: int = FILE_MODE) -> Iterator[int]:
    """Yield the descriptor of a new file below ``root``. Raises OSError.

    A large file is synced at the end, the others together by ``new_directory``.
    """
    # The sync of large files overlaps with the writes of other threads.
    fd = root.create(name, mode)
    try:
        yield fd
        if os.fstat(fd).st_size >= _LARGE:
            sync_file(fd, root.path)
    finally:
        os.close(fd)


class LinkMethod(StrEnum):
    """The method by which a whole file was created.

    A reflink (Linux, ``ioctl_ficlone(2)``) is a separate file that shares blocks until one of the
    files is written. A hard link is another name of the blob, and must never be written to.
    """

    COPIED = "copied"
    REFLINKED = "reflinked"
    HARD_LINKED = "hardLinked"


def link(blob: Path, root: OpenDirectory, name: str) -> tuple[LinkMethod, io.FileIO] | None:
    """Share the bytes of ``blob`` as a new file; return None if this is impossible.

    The new file is open for reading, as its bytes are not verified yet.
    """
    if _reflink(blob, root, name):
        return LinkMethod.REFLINKED, io.FileIO(root.open(name))
    try:
        return LinkMethod.HARD_LINKED, root.link_from(blob, name)
    except OSError:
        # It is another file system, does not support links, or the file has too many.
        return None


def _reflink(blob: Path, root: OpenDirectory, name: str) -> bool:
    if sys.platform != "linux":
        return False
    fd = root.create(name, FILE_MODE)
    try:
        with blob.open("rb") as source:
            fcntl.ioctl(fd, _FICLONE, source.fileno())
        return True
    except OSError:
        # One that remains would be in the way of the copy
        root.unlink(name)
        return False
    finally:
        os.close(fd)

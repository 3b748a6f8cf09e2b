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
    flock,
    is_temporary,
    remove_leftovers,
    sync_file_system,
    temporary_name,
    temporary_prefix,
)
from clowder_aimage.content.open_directory import READ, OpenDirectory, resolve
from clowder_aimage.errors import NoSpaceError, StoreError, UsageError

FILE_MODE, DIRECTORY_MODE = 0o644, 0o755  # before the umask is applied
_INFIX = "export-"
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
_LARGE = 16 * 1024 * 1024  # bytes of a file that is synced as soon as it is written
_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)


@contextmanager
def whole_directory(path: Path) -> Iterator[OpenDirectory]:
    """Yield a new directory to fill.

    It is at ``path`` after the block succeeds; otherwise it is removed. Another user who may write
    the parent directory cannot lead the files elsewhere.

    A missing directory is filled under a temporary name and renamed. An existing empty directory
    is kept, since it may be a mount or a working directory: its contents are written to a temporary
    directory inside it, and moved up at the end. All files are durable before that.

    Raises:
        UsageError: ``path`` is a file, a directory that is not empty, or has no parent.
        NoSpaceError, StoreError: It cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with faults(path):
            final = resolve(path)
            is_there = os.path.lexists(final)
            _check(path, final, is_there)
            place = stack.enter_context(OpenDirectory(final if is_there else final.parent))
            temporary = temporary_name(final, _INFIX)
            made = stack.enter_context(place.make_new(temporary, DIRECTORY_MODE))
        try:
            flock(made.fd, fcntl.LOCK_EX)
            prefix = temporary_prefix(final, _INFIX)
            remove_leftovers(place, temporary, prefix, OpenDirectory.remove_tree)
            yield made
            with faults(path):
                _sync(made)
                try:
                    if is_there:
                        _move_up(place, made)
                    else:
                        place.rename(os.fstat(made.fd), temporary, final.name)
                except OSError as error:
                    if error.errno in _OCCUPIED:  # another process created it meanwhile
                        raise _occupied(path) from error
                    raise
        except BaseException:
            made.clear()
            raise
        finally:
            place.remove_tree(temporary)
        with faults(path):
            place.sync()


def is_folding(directory: OpenDirectory) -> bool:
    """Return whether the file system is case-insensitive.

    ``directory`` is one that this module created.
    """
    return directory.path.with_name(directory.path.name.swapcase()).exists()


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Convert an OSError on output to a NoSpaceError or a StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise NoSpaceError(
                f"no space left while writing {path}; incomplete files were removed",
                hint="free some space, or export to another disk",
            ) from error
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def _check(path: Path, final: Path, is_there: bool) -> None:
    if not is_there:
        if not final.parent.is_dir():
            raise UsageError(f"cannot create {path}: no such directory: {path.parent}")
        return
    if not final.is_dir():
        raise UsageError(f"{path} is a file", hint="pass a directory that does not exist yet")
    prefix = temporary_prefix(final, _INFIX)
    for place in final.iterdir():
        is_ours = is_temporary(place.name, prefix)  # of a running or a killed process
        if not is_ours or place.is_symlink() or not place.is_dir():
            raise _occupied(path)


def _occupied(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not empty", hint="pass a directory that is empty or does not exist yet"
    )


def _sync(made: OpenDirectory) -> None:
    """Make all files below a directory durable, together if possible. Raises OSError."""
    if sync_file_system(made.fd):
        return
    for _, _, names, fd in os.fwalk(dir_fd=made.fd, follow_symlinks=False):
        for name in names:
            if not stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                with os.fdopen(os.open(name, READ, dir_fd=fd), "rb", 0) as file:
                    os.fsync(file.fileno())
        os.fsync(fd)


def _move_up(final: OpenDirectory, temporary: OpenDirectory) -> None:
    """Move the contents of ``temporary`` into ``final``, its parent: all of it, or nothing."""
    if final.names() != [temporary.path.name]:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    moved: list[str] = []
    try:
        for name in temporary.names():
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

    A large one is synced at the end, the others together by ``whole_directory``.
    """
    fd = root.create(name, mode)
    try:
        yield fd
        if os.fstat(fd).st_size >= _LARGE:
            os.fsync(fd)
    finally:
        os.close(fd)


class LinkMethod(StrEnum):
    """The way in which a whole file was created in the directory.

    A reflink (Linux, ``ioctl_ficlone(2)``) is a separate file that shares blocks until either one
    is written. A hard link is another name of the blob, and must never be written to.
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
    except OSError:  # another file system, one without links, or too many links
        return None


def _reflink(blob: Path, root: OpenDirectory, name: str) -> bool:
    if sys.platform != "linux":
        return False
    made = root.create(name, FILE_MODE)
    try:
        with blob.open("rb") as source:
            fcntl.ioctl(made, _FICLONE, source.fileno())
    except OSError:
        root.remove(name)
        return False
    finally:
        os.close(made)
    return True

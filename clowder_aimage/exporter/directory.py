"""Output directory of an export, created atomically, and the files in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
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
    sync_directory,
    temporary_path,
    temporary_prefix,
)
from clowder_aimage.errors import NoSpaceError, StoreError, UsageError

FILE_MODE, DIRECTORY_MODE = 0o644, 0o755  # before the umask is applied
_INFIX = "export-"
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
_TRIES = 4  # a thread that is being stopped may still create a file


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory to fill.

    It is at ``path`` after the block succeeds; otherwise it is removed.

    A missing directory is filled under a temporary name and renamed. An existing empty directory
    is kept, since it may be a mount or a working directory: its contents are written to a temporary
    directory inside it, and moved up at the end.

    Raises:
        UsageError: ``path`` is a file, a directory that is not empty, or has no parent.
        NoSpaceError, StoreError: It cannot be written.
    """
    with faults(path):
        final = Path(os.path.realpath(path))
        is_there = os.path.lexists(final)
        _check(path, final, is_there)
        temporary = temporary_path(final, final if is_there else None, _INFIX)
        lock = _create(temporary)
    try:
        remove_leftovers(temporary, temporary_prefix(final, _INFIX), _remove)
        yield temporary
        with faults(path):
            try:
                if is_there:
                    _move_up(final, temporary)
                else:
                    temporary.rename(final)
            except OSError as error:
                if error.errno in _OCCUPIED:  # another process created it meanwhile
                    raise _occupied(path) from error
                raise
            sync_directory(final if is_there else final.parent)
    finally:
        _remove(temporary)
        os.close(lock)


def is_folding(directory: Path) -> bool:
    """Return whether the file system is case-insensitive.

    ``directory`` is one that this module created.
    """
    return directory.with_name(directory.name.swapcase()).exists()


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


def _create(temporary: Path) -> int:
    """Create a directory and return its descriptor, locked until closed. Raises OSError."""
    temporary.mkdir(mode=DIRECTORY_MODE)
    try:
        lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except BaseException:
        temporary.rmdir()
        raise
    flock(lock, fcntl.LOCK_EX)
    return lock


def _move_up(final: Path, temporary: Path) -> None:
    """Move the contents of ``temporary`` into ``final``, its parent: all of it, or nothing."""
    if list(final.iterdir()) != [temporary]:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    moved: list[Path] = []
    try:
        for made in sorted(temporary.iterdir()):
            moved.append(made)
            made.rename(final / made.name)
    except BaseException:
        for made in moved:
            with contextlib.suppress(OSError):
                (final / made.name).rename(made)
        raise


def _remove(directory: Path) -> None:
    for _ in range(_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return


@contextmanager
def new_file(path: Path, mode: int = FILE_MODE) -> Iterator[int]:
    """Yield the descriptor of a new file, which is synced at the end.

    Raises OSError.
    """
    fd = os.open(path, _FLAGS, mode)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(root: Path, name: str) -> None:
    """Create ``root/name`` and its missing parents. Raises OSError."""
    path = root
    for part in filter(None, name.split("/")):
        path = path / part
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=DIRECTORY_MODE)


class LinkMethod(StrEnum):
    """The way in which a whole file was created in the directory.

    A reflink (Linux, ``ioctl_ficlone(2)``) is a separate file that shares blocks until either one
    is written. A hard link is another name of the blob, and must never be written to.
    """

    COPIED = "copied"
    REFLINKED = "reflinked"
    HARD_LINKED = "hardLinked"


def link(blob: Path, target: Path) -> LinkMethod | None:
    """Share the bytes of ``blob`` as the new file ``target``; return None if this is impossible."""
    if _reflink(blob, target):
        return LinkMethod.REFLINKED
    try:
        os.link(blob, target)
    except OSError:  # another file system, one without links, or too many links
        return None
    return LinkMethod.HARD_LINKED


def _reflink(blob: Path, target: Path) -> bool:
    if sys.platform != "linux":
        return False
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with blob.open("rb") as source:
            fcntl.ioctl(made, _FICLONE, source.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            target.unlink()
        return False
    finally:
        os.close(made)
    return True

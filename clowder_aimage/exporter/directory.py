"""The directory that is exported to: there whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, UsageError

FILE_MODE, DIRECTORY_MODE = 0o644, 0o755  # less what the umask takes
_INFIX = "export-"
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
_TRIES = 4  # a thread that is being stopped may still make a file


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory to fill.

    It is called ``path`` once the block has ended well; else nothing of it stays.

    One that does not exist is filled beside its place and renamed. One that exists, and is empty,
    stays the same directory, perhaps a mount or somebody's working directory: what it is to hold is
    gathered inside it, and moved up at the end.

    Raises:
        UsageError: ``path`` is a file, or a directory that is not empty, or has no parent.
        NoSpaceError, StoreError: it cannot be written.
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
            if is_there:
                _move_up(path, final, temporary)
            else:
                _rename(path, final, temporary)
            sync_directory(final if is_there else final.parent)
    finally:
        _remove(temporary)
        os.close(lock)


def is_folding(directory: Path) -> bool:
    """Return whether the file system takes ``A`` and ``a`` for one name.

    ``directory`` is one of ours.
    """
    return directory.with_name(directory.name.swapcase()).exists()


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Turn an OSError about what is written into an error for people."""
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: Path) -> AImageError:
    if error.errno in DISK_FULL:
        return NoSpaceError(
            f"no space left to write {path}; nothing of it was kept",
            hint="free some space, or export to another disk",
        )
    return StoreError(f"cannot write {path}: {error.strerror or error}")


def _check(path: Path, final: Path, is_there: bool) -> None:
    if not is_there:
        if not final.parent.is_dir():
            raise UsageError(f"there is no directory {path.parent} to make {path.name} in")
        return
    if not final.is_dir():
        raise UsageError(f"{path} is a file", hint="name a directory that does not exist yet")
    if any(not _is_ours(place, temporary_prefix(final, _INFIX)) for place in final.iterdir()):
        raise _occupied(path)


def _occupied(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not empty", hint="name a directory that is empty, or does not exist yet"
    )


def _is_ours(path: Path, prefix: str) -> bool:
    """Return whether it is a temporary directory, of a running process or a killed one."""
    return is_temporary(path.name, prefix) and path.is_dir() and not path.is_symlink()


def _create(temporary: Path) -> int:
    """Make a directory; return its descriptor, locked as long as it is open. Raises OSError."""
    temporary.mkdir(mode=DIRECTORY_MODE)
    try:
        lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except BaseException:
        temporary.rmdir()
        raise
    flock(lock, fcntl.LOCK_EX)
    return lock


def _rename(path: Path, final: Path, temporary: Path) -> None:
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno in _OCCUPIED:  # somebody made it meanwhile
            raise _occupied(path) from error
        raise


def _move_up(path: Path, final: Path, temporary: Path) -> None:
    """Move the contents of ``temporary`` into ``final``, around it: all of it, or nothing."""
    if list(final.iterdir()) != [temporary]:
        raise _occupied(path)
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

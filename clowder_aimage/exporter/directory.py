"""The directory that is exported to: there whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, UsageError
from clowder_aimage.layout.lock import flock, sync_directory

FILE_MODE, DIRECTORY_MODE = 0o644, 0o755  # less what the umask takes
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
_TRIES = 4  # a thread that is being stopped may still make a file


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A new directory to fill. It is called ``path`` once the block has ended well; else nothing of
    it stays.

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
        temporary, lock = _new(final if is_there else final.parent, _prefix(final))
    try:
        _remove_leftovers(temporary, _prefix(final))
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
    """Whether the file system takes ``A`` and ``a`` for one name; ``directory`` is one of ours."""
    return directory.with_name(directory.name.swapcase()).exists()


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Turn an OSError about what is written into an error for people."""
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: Path) -> AImageError:
    if error.errno in _FULL:
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
    if any(not _is_ours(place, _prefix(final)) for place in final.iterdir()):
        raise _occupied(path)


def _occupied(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not empty", hint="name a directory that is empty, or does not exist yet"
    )


def _prefix(final: Path) -> str:
    """What the names of directories begin with that shall become ``final``."""
    return f".{final.name[:100]}.export-"


def _is_ours(path: Path, prefix: str) -> bool:
    """Whether it is such a directory, of a running process or a killed one."""
    is_called_so = re.fullmatch(re.escape(prefix) + "[0-9a-f]{8}", path.name) is not None
    return is_called_so and path.is_dir() and not path.is_symlink()


def _new(place: Path, prefix: str) -> tuple[Path, int]:
    """A new directory in ``place``, locked as long as it is open. Raises OSError."""
    path = place / f"{prefix}{secrets.token_hex(4)}"
    path.mkdir(mode=DIRECTORY_MODE)
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except BaseException:
        path.rmdir()
        raise
    flock(lock, fcntl.LOCK_EX)
    return path, lock


def _remove_leftovers(temporary: Path, prefix: str) -> None:
    """Remove what killed processes have left beside ``temporary``: what nobody has locked. What
    cannot be removed stays."""
    if not _is_locked(temporary):  # locks do not work here, and nobody can tell
        return
    for path in list(temporary.parent.iterdir()):
        if _is_ours(path, prefix):
            with contextlib.suppress(OSError):
                if not _is_locked(path):
                    _remove(path)


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _rename(path: Path, final: Path, temporary: Path) -> None:
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno in _OCCUPIED:  # somebody made it meanwhile
            raise _occupied(path) from error
        raise


def _move_up(path: Path, final: Path, temporary: Path) -> None:
    """What is in ``temporary`` into ``final``, around it; all of it, or nothing."""
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

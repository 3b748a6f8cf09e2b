"""Calls that some file systems lack, and the next best way for each.

Network shares and FUSE refuse some calls of local disks. Each function here makes such a call;
where it is refused, the next best way is taken, and the limit is reported. Faults of a disk, such
as EIO and ENOSPC, are raised.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

from clowder_aimage.document.optional_file import warn

# Linux: SMB, NFS, 9p and FUSE; "not supported" has two numbers on macOS.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})
_FORBIDDEN = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})
# EBADF: an exclusive lock on NFS needs a descriptor for writing, as a sync on SMB does.
_NO_LOCKS = UNSUPPORTED | {errno.ENOLCK, errno.EBADF}
_NO_SYNC = UNSUPPORTED | _FORBIDDEN | {errno.EBADF, errno.EISDIR}
# A second name for a file: also another file system, and too many names.
NO_LINK = UNSUPPORTED | _FORBIDDEN | {errno.EXDEV, errno.EMLINK, errno.EIO}
# What to do about errors that neither the disk nor its server causes
ADVICE = {
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENFILE: "the system has too many open files: end some programs",
    errno.EFBIG: "use a disk whose file system allows files of that size (FAT32 does not above "
    "4 GB), and check the limit that 'ulimit -f' prints",
}
# Attempts to read a file that another host replaces
_ATTEMPTS = 6
T = TypeVar("T")


class Limit(StrEnum):
    """Something that a file system lacks."""

    LOCKS = "locks"
    HOST_LOCKS = "hostLocks"
    FILE_SYNC = "fileSync"
    DIRECTORY_SYNC = "directorySync"
    MODES = "modes"
    TIMES = "times"
    FREE_SPACE = "freeSpace"


class Space(NamedTuple):
    """The size of a file system, and the space left for ordinary users, in bytes."""

    total: int
    used: int
    free: int


# Called in any thread with a limit, and the path of the file or directory where it was met. Without
# listeners a warning is issued once for each file system.
ON_LIMIT: list[Callable[[Limit, Path], object]] = []
_warned: set[tuple[Limit, int]] = set()
_collected: ContextVar[set[Limit] | None] = ContextVar("_collected", default=None)


def report_limit(limit: Limit, path: str | Path) -> None:
    """Pass a limit of the file system of ``path`` to the listeners."""
    if (collected := _collected.get()) is not None:
        collected.add(limit)
        return
    for listener in ON_LIMIT:
        listener(limit, Path(path))
    existing = find_existing(Path(path))
    key = limit, existing.stat().st_dev
    if not ON_LIMIT and key not in _warned:
        _warned.add(key)
        warn(f"the file system of {existing} lacks {limit}")


@contextlib.contextmanager
def collect_limits() -> Iterator[set[Limit]]:
    """Yield the set of the limits that are met in this thread meanwhile; nobody hears of them."""
    limits = set[Limit]()
    token = _collected.set(limits)
    try:
        yield limits
    finally:
        _collected.reset(token)


def find_existing(path: Path) -> Path:
    """Return a path, or its first parent that exists."""
    # os.path.exists raises no error
    return next(
        parent
        for parent in (path, *path.absolute().parents)
        if os.path.exists(parent)  # noqa: PTH110
    )


def _attempt(call: Callable[[], object], refusals: frozenset[int]) -> bool:
    """Make a call; return False if it is refused. Raises OSError for other errors."""
    try:
        call()
    except OSError as error:
        if error.errno not in refusals:
            raise
        return False
    return True


def lock(fd: int, operation: int) -> bool:
    """Lock an open file by flock(2); return False if the file system has no locks.

    Raises BlockingIOError with LOCK_NB: it is locked; on some shares also without it.
    """
    return _attempt(lambda: _flock(fd, operation), _NO_LOCKS)


def _flock(fd: int, operation: int) -> None:
    try:
        fcntl.flock(fd, operation)
    except PermissionError as error:
        # SMB has this error for a file that is locked (fcntl(2): EACCES or EAGAIN), AFS for all.
        if error.errno != errno.EACCES:
            raise
        code = errno.EAGAIN if _has_locks(fd) else errno.ENOLCK
        raise OSError(code, os.strerror(code)) from None


def _has_locks(fd: int) -> bool:
    """Return False if not even a new file can be locked beside an open one."""
    try:
        path = Path(f"/proc/self/fd/{fd}").readlink()
    except OSError:
        return True
    return _can_lock_new_file(path if stat.S_ISDIR(os.fstat(fd).st_mode) else path.parent)


@functools.lru_cache(maxsize=16)
def _can_lock_new_file(directory: Path) -> bool:
    path = directory / f".lock.{os.urandom(8).hex()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            operation = fcntl.LOCK_SH | fcntl.LOCK_NB
            return _attempt(lambda: fcntl.flock(fd, operation), _FORBIDDEN | _NO_LOCKS)
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)
    except OSError:
        return True


def open_to_lock(path: str | Path, flags: int, directory: int | None = None) -> int:
    """Open a file to test its lock: for writing if possible, as NFS demands."""
    try:
        return os.open(path, flags & ~os.O_ACCMODE | os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(path, flags | os.O_NOFOLLOW, dir_fd=directory)


def is_locked(fd: int) -> bool:
    """Return True if an open file is locked by another descriptor, else lock it. Raises OSError."""
    # On NFS a file that is open for reading only cannot be locked exclusively (EBADF), but a shared
    # lock conflicts with the exclusive one of another process, too.
    for operation in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        try:
            _flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            return False
    return False


def is_file_locked(path: str | Path, flags: int) -> bool:
    """Return True if a file is locked by any process, this one included. Raises OSError."""
    fd = open_to_lock(path, flags)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def sync_file(fd: int, path: str | Path, *, data_only: bool = False) -> None:
    """Make an open file durable, as far as the file system can. Raises OSError."""
    # macOS has no fdatasync.
    fdatasync = getattr(os, "fdatasync", os.fsync)
    for sync in (fdatasync, os.fsync) if data_only else (os.fsync, fdatasync):
        if _attempt(lambda sync=sync: sync(fd), _NO_SYNC):  # type: ignore[misc]
            return
    if not sync_file_system(fd):
        report_limit(Limit.FILE_SYNC, path)


def sync_directory(fd: int, path: str | Path) -> None:
    """Make the names in an open directory durable, as far as possible. Raises OSError."""
    if not _attempt(lambda: os.fsync(fd), _NO_SYNC):
        report_limit(Limit.DIRECTORY_SYNC, path)


def sync_file_system(fd: int) -> bool:
    """Make everything on the file system of ``fd`` durable; return False without such a call.

    A disk takes as long to synchronise one small file as a hundred. Raises OSError.
    """
    import ctypes

    syncfs = _load_syncfs()
    if syncfs is None:
        return False

    def sync() -> None:
        if syncfs(fd) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    return _attempt(sync, _NO_SYNC)


def _load_syncfs() -> Callable[[int], int] | None:
    # Imported late: many verbs write no files.
    import ctypes

    try:
        return ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None


def extend(fd: int, size: int) -> None:
    """Extend an open, shorter file to ``size`` bytes, which are zeros. Raises OSError."""
    if not _attempt(lambda: os.ftruncate(fd, size), UNSUPPORTED | _FORBIDDEN):
        os.pwrite(fd, b"\0", size - 1)


def set_mode(fd: int, mode: int, path: str | Path) -> None:
    """Set the permissions of an open file or directory, if the file system has them."""
    if not _attempt(lambda: os.fchmod(fd, mode), UNSUPPORTED | _FORBIDDEN):
        report_limit(Limit.MODES, path)


def set_current_time(path: str | Path) -> bool:
    """Set the times of a file, not of a link's target, to now; return False if that is refused."""
    if _attempt(lambda: os.utime(path, follow_symlinks=False), UNSUPPORTED | _FORBIDDEN):
        return True
    report_limit(Limit.TIMES, path)
    return False


def measure_space(path: Path) -> Space | None:
    """Return the space of the file system of a path or of its first existing parent.

    None if the file system does not report it: it is unknown, not full.
    """
    with contextlib.suppress(OSError):
        status = os.statvfs(find_existing(path))
        unit = status.f_frsize or status.f_bsize
        # FUSE without statfs reports zeros
        if status.f_blocks > 0 and unit > 0:
            used = (status.f_blocks - status.f_bfree) * unit
            return Space(status.f_blocks * unit, used, status.f_bavail * unit)
    report_limit(Limit.FREE_SPACE, path)
    return None


def read_again(read: Callable[[], T]) -> T:
    """Call ``read``, again if another host has replaced the file meanwhile (NFS: ESTALE)."""
    for _ in range(_ATTEMPTS):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read()

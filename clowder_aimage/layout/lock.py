"""Interprocess locks, files shared by a group, and the errors of a store.

Locks use ``flock`` and end with the process. On a local file system without locks processes
continue without them; published content is still verified. A file system of several hosts, whose
locks do not reach from one to the other, is written only if the user says that one host alone
writes (docs/operations.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from clowder_aimage.content.atomic_file import DISK_FULL, sync_directory
from clowder_aimage.content.file_system import (
    ADVICE,
    UNSUPPORTED,
    Limit,
    is_file_locked,
    lock,
    read_again,
    report_limit,
    set_current_time,
    set_mode,
)
from clowder_aimage.content.mount import find_mount
from clowder_aimage.content.open_directory import READ, OpenDirectory, unlink
from clowder_aimage.errors import AImageError, NoSpaceError, StoreBusyError, StoreError

# The directory of aimage in a store.
PRIVATE = ".aimage"
# The version of the private files (docs/upgrade.md).
VERSION = 1
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
# The mode of a private file in a group's store
SHARED_MODE = 0o660
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# Those of ``open_shared`` for a file to which several processes add lines
APPEND = _FLAGS | os.O_APPEND
# Seconds by which a file server's clock may be ahead
_SKEW = 300.0
_MOMENT = 0.01  # seconds
# Seconds without changes after which a file counts as complete
_SETTLED = 5.0
# Reads of a file that another tool is writing in place.
_MAX_READS = 20
# Seconds between two reads.
_INTERVAL = 0.02
# Seconds after which a process that is waited for is named
_NOTICE = 2.0
# Seconds between two attempts to take a lock
_LONGEST_WAIT = 0.05
# Seconds to wait for a lock in this context. Servers set it for their threads.
PATIENCE: ContextVar[float] = ContextVar("PATIENCE", default=math.inf)
# Called in any thread with the resource in use, and the id of the process that uses it, if known.
# Without listeners the wait is logged.
ON_WAIT: list[Callable[[str, int | None], object]] = []
# Return True if the user states that no other host writes the stores
SINGLE_WRITER: list[Callable[[], bool]] = []
T = TypeVar("T")


def read_settled(read: Callable[[], T], path: str | Path, malformed: type[AImageError]) -> T:
    """Call ``read`` until another tool is no longer writing the file. Raises OSError."""

    def is_unsettled(error: BaseException) -> bool:
        is_malformed = isinstance(error, malformed)
        return is_malformed and abs(time.time() - os.stat(path).st_mtime) <= _SETTLED

    try:
        # This nearly always succeeds, and importing tenacity takes longer.
        return read_again(read)
    except malformed as error:
        if not is_unsettled(error):
            raise
    import tenacity

    time.sleep(_INTERVAL)
    retryer = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_unsettled),
        wait=tenacity.wait_fixed(_INTERVAL),
        stop=tenacity.stop_after_attempt(_MAX_READS - 1),
        reraise=True,
    )
    return retryer(read)


@contextlib.contextmanager
def translate_store_errors(root: Path) -> Iterator[None]:
    """Convert an OSError about the store at ``root`` to a StoreError or a NoSpaceError."""
    try:
        yield
    except OSError as error:
        raise _build_store_error(error, root) from error


def _build_store_error(error: OSError, root: Path) -> AImageError:
    if error.errno in DISK_FULL:
        return NoSpaceError(
            f"no space left for the store {root}",
            hint="free some space, or use a store on another disk; "
            "completed blobs are kept and will not be fetched again",
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not root.is_dir():
        return StoreError(f"the store {root} is not a directory", remedy="store_directory")
    reason = f"{error.strerror or error} ({error.filename or root})"
    message = f"cannot use the store {root}: {reason}"
    if error.errno in READ_ONLY:
        return StoreError(message, remedy="store_permissions")
    if error.errno in UNSUPPORTED:
        return StoreError(message, remedy="store_calls")
    disk = "check the disk, or the connection to its server"
    return StoreError(message, hint=ADVICE.get(error.errno or 0, disk))


def supports_locks(root: Path) -> bool:
    """Return True if the store's file system has locks; True if that cannot be tested."""
    try:
        with hold_lock(root, "lock", shared=True), translate_store_errors(root):
            return is_file_locked(root / PRIVATE / "lock", READ)
    except StoreError:
        return True


@contextlib.contextmanager
def hold_lock(root: Path, name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold the store's lock of that name. Raises StoreError; StoreBusyError after PATIENCE."""
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with translate_store_errors(root):
        make_directory(root, PRIVATE)
        fd = read_again(lambda: _open_locked(root / PRIVATE / name, operation, root))
    try:
        yield
    finally:
        close_unwritten(fd)


def _open_locked(path: Path, operation: int, root: Path) -> int:
    fd = open_shared(path)
    try:
        _acquire(fd, operation, root)
    except BaseException:
        close_unwritten(fd)
        raise
    return fd


def close_unwritten(fd: int) -> None:
    """Close a file that has no data to lose; ignore errors."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _acquire(fd: int, operation: int, root: Path) -> None:
    with contextlib.suppress(BlockingIOError):
        lock_file(fd, operation | fcntl.LOCK_NB, root)
        return
    patience = PATIENCE.get()
    notice = threading.Timer(_NOTICE, lambda: report_wait(f"the store {root}", fd))
    notice.daemon = True
    notice.start()
    try:
        # Shares that cannot wait for a lock refuse it at once
        with contextlib.suppress(BlockingIOError):
            if patience == math.inf:
                lock_file(fd, operation, root)
                return
        import tenacity

        retryer = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(BlockingIOError),
            wait=tenacity.wait_exponential(multiplier=_MOMENT / 10, max=_LONGEST_WAIT),
            stop=tenacity.stop_after_delay(patience),
            reraise=True,
        )
        retryer(lock_file, fd, operation | fcntl.LOCK_NB, root)
    except BlockingIOError:
        raise StoreBusyError(
            f"the store {root} is in use by process {find_holder_pid(fd) or 'unknown'}",
            hint="try again later",
        ) from None
    finally:
        notice.cancel()


def lock_file(fd: int, operation: int, root: Path) -> None:
    """Lock a file of a store, if its file system has locks.

    Raises StoreError: an exclusive lock cannot exclude other hosts; BlockingIOError with LOCK_NB.
    """
    has_lock = lock(fd, operation)
    if operation & fcntl.LOCK_EX:
        check_single_writer(root, has_lock=has_lock)
    if not has_lock:
        report_limit(Limit.LOCKS, root / PRIVATE)


def check_single_writer(root: Path, *, has_lock: bool = True) -> None:
    """Raise StoreError if other hosts could write the store meanwhile."""
    mount = find_mount(root)
    if not mount.is_network or (has_lock and not mount.has_local_locks):
        return
    if any(is_single() for is_single in SINGLE_WRITER):
        report_limit(Limit.HOST_LOCKS, root)
        return
    kind = mount.type or "unknown"
    raise StoreError(
        f"cannot write the store {root}: its file system ({kind}) has no locks between hosts",
        remedy="single_writer",
    )


def report_wait(resource: str, file: int | str | Path) -> None:
    """Report a wait for the process that locks ``file`` and thus uses ``resource``."""
    pid = find_holder_pid(file)
    for listener in ON_WAIT:
        listener(resource, pid)
    if not ON_WAIT:
        import logging

        fields = {"pid": pid, "what": resource}
        logging.getLogger("aimage.store").warning("waiting for another process", extra=fields)


def find_holder_pid(file: int | str | Path) -> int | None:
    """Return the id of a process that has locked a file, if the system lists it (proc(5))."""
    with contextlib.suppress(OSError, ValueError):
        inode = str(os.stat(file).st_ino)
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            # A line is "1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF".
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
                return int(fields[4]) or None
    return None


def open_shared(path: str | Path, flags: int = _FLAGS) -> int:
    """Open or create a file for all users with write access to its directory. Raises OSError."""
    try:
        return os.open(path, flags & ~os.O_CREAT)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        fd = os.open(path, flags | os.O_EXCL, 0o600)
    except FileExistsError:
        # Another process has just created the file, and is about to share it.
        time.sleep(_MOMENT)
        return os.open(path, flags & ~os.O_CREAT)
    share(fd, os.path.dirname(path))
    return fd


def touch(path: str | Path) -> None:
    """Create an empty file if it is missing, and set its time to now. Raises OSError."""
    os.close(open_shared(path))
    if not set_current_time(path):
        # A new file has the current time, too
        unlink(path)
        os.close(open_shared(path))


def sanitize_time(timestamp: float, current: float) -> float:
    """Return a file's time, or 0, the oldest, for one in the future: a clock was wrong."""
    return timestamp if timestamp <= current + _SKEW else 0.0


def open_regular(path: str | Path) -> int:
    """Open a regular file to read it. Raises OSError.

    For a link or a pipe it is a FileNotFoundError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def check_version(root: Path) -> None:
    """Raise StoreError if a newer version of aimage wrote private files in another form.

    Such a version records its form in ``.aimage/version``; the first form has no such file. A
    linked directory is not read; ``check_own`` refuses writes there.
    """
    private = os.path.join(root, PRIVATE)
    if os.path.islink(private):
        return
    with translate_store_errors(root):
        try:
            text = read_again(lambda: _read_version(os.path.join(private, "version")))
        except (FileNotFoundError, NotADirectoryError):
            return
        except ValueError:
            text = ""
    if text != str(VERSION):
        version = text if text.isalnum() else "unknown"
        raise StoreError(
            f"the store {root} has version {version}, of a newer release; this one uses {VERSION}",
            hint="use the newer release, or another store",
        )


def _read_version(path: str) -> str:
    with open(open_regular(path), encoding="ascii") as file:
        return file.read(20).strip()


def check_own(root: Path, *kind: str) -> str:
    """Return the path of a private directory of the store, existing or not.

    Raises StoreError if it is a link: files are removed and written there; also if the store is of
    a newer version.
    """
    check_version(root)
    for count in range(len(kind) + 1):
        path = os.path.join(root, PRIVATE, *kind[:count])
        if os.path.islink(path):
            raise StoreError(
                f"{path} is a link, which may point to files of another program",
                hint="remove the link; the directory is created when needed",
            )
    return path


def is_shared(directory: os.stat_result) -> bool:
    """Return True if a directory is a group's: setgid, and writable by it."""
    return bool(directory.st_mode & stat.S_ISGID and directory.st_mode & stat.S_IWGRP)


def share(fd: int, directory: str | Path, mode: int = SHARED_MODE) -> None:
    """Share a new file with the group of a group's directory."""
    if is_shared(os.stat(directory)):
        set_mode(fd, mode, directory)


def make_directory(root: Path, *names: str) -> Path:
    """Create ``root/names...`` if it is missing, shared with the group in a group's store."""
    if names[0] == PRIVATE:
        check_own(root, *names[1:])
    path = root.joinpath(*names)
    if path.is_dir():
        return path
    if not root.is_dir():
        new = [directory for directory in (root, *root.parents) if not directory.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for directory in new:
            sync_directory(directory.parent)
    mode = stat.S_IMODE(root.stat().st_mode)
    subdirectory = root
    for name in names:
        subdirectory = subdirectory / name
        with contextlib.suppress(FileExistsError):
            subdirectory.mkdir()
            if mode & stat.S_ISGID and mode & stat.S_IWGRP:
                with OpenDirectory(subdirectory) as created:
                    set_mode(created.fd, mode, subdirectory)
            sync_directory(subdirectory.parent)
    return path

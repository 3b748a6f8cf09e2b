"""Calls that file systems refuse: the next best way is taken, and the limit is reported once."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.content import file_system
from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.content.file_system import Limit, collect_limits
from clowder_aimage.content.open_directory import READ, OpenDirectory

# A call, an error that a real file system has for it, and what is reported.
REFUSALS = [
    *(("flock", code, Limit.LOCKS) for code in ("ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL")),
    ("flock", "EBADF", Limit.LOCKS),
    # AFS: not a lock of another process, as a new file cannot be locked either
    ("flock", "EACCES", Limit.LOCKS),
    *(("sync", code, Limit.FILE_SYNC) for code in ("ENOSYS", "EINVAL", "EOPNOTSUPP", "EROFS")),
    *(("sync", code, Limit.DIRECTORY_SYNC) for code in ("EINVAL", "EBADF", "EACCES", "ENOTSUP")),
    *(("sync", code, Limit.DIRECTORY_SYNC) for code in ("EPERM", "EISDIR", "ENOSYS")),
    *(("fchmod", code, Limit.MODES) for code in ("EPERM", "EACCES", "ENOTSUP", "ENOSYS", "EROFS")),
    *(("utime", code, Limit.TIMES) for code in ("EPERM", "EACCES", "ENOSYS", "EINVAL")),
    *(("statvfs", code, Limit.FREE_SPACE) for code in ("ENOSYS", "EACCES", "EIO", "EOVERFLOW")),
]
# Faults of a disk, or of a program
FAULTS = ["EIO", "ENOSPC", "EDQUOT", "ESTALE"]
CALLS = {
    "flock": [(fcntl, "flock")],
    "sync": [(os, "fsync"), (os, "fdatasync"), (file_system, "sync_file_system")],
    "fchmod": [(os, "fchmod")],
    "utime": [(os, "utime")],
    "statvfs": [(os, "statvfs")],
    "ftruncate": [(os, "ftruncate")],
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Path, int, OpenDirectory]]:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with path.open("r+b") as file, OpenDirectory(tmp_path) as directory:
        yield path, file.fileno(), directory


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, code: str) -> None:
    number = getattr(errno, code)

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    for module, name in CALLS[call]:
        works = name == "sync_file_system"
        monkeypatch.setattr(module, name, (lambda _: False) if works else fail)


def attempt(limit: Limit, path: Path, fd: int, directory: OpenDirectory) -> object:
    attempts: dict[Limit, Callable[[], object]] = {
        Limit.LOCKS: lambda: file_system.lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        Limit.FILE_SYNC: lambda: file_system.sync_file(fd, path),
        Limit.DIRECTORY_SYNC: directory.sync,
        Limit.MODES: lambda: file_system.set_mode(fd, 0o600, path),
        Limit.TIMES: lambda: file_system.set_current_time(path),
        Limit.FREE_SPACE: lambda: file_system.measure_space(path),
    }
    return attempts[limit]()


@pytest.mark.parametrize(("call", "code", "limit"), REFUSALS)
def test_a_refused_call_is_a_limit(
    opened: Any, call: str, code: str, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collect_limits() as none:
        attempt(limit, *opened)
    assert none == set()
    refuse(monkeypatch, call, code)
    with collect_limits() as limits:
        outcome = attempt(limit, *opened)
    assert not outcome
    # A lock's absence is reported by the store, which may refuse to be written
    assert limits == ({limit} - {Limit.LOCKS})


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize(
    ("call", "limit"),
    [("flock", Limit.LOCKS), ("sync", Limit.FILE_SYNC), ("sync", Limit.DIRECTORY_SYNC)],
)
def test_a_fault_is_raised(
    opened: Any, call: str, limit: Limit, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, call, code)
    with pytest.raises(OSError, match=os.strerror(getattr(errno, code))):
        attempt(limit, *opened)


def test_zero_blocks_mean_an_unknown_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, *[0] * 8)))
    assert file_system.measure_space(tmp_path / "not" / "yet") is None


def test_a_full_disk_is_not_an_unknown_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 100, 5, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert file_system.measure_space(tmp_path) == (409600, 95 * 4096, 0)


@pytest.mark.parametrize("code", ["EPERM", "ENOSYS", "EINVAL"])
def test_a_file_is_extended_by_a_write(
    opened: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "ftruncate", code)
    file_system.extend(opened[1], 5)
    assert opened[0].read_bytes() == b"x\0\0\0\0"


def test_a_count_of_links_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE may leave it at zero."""
    fstat = os.fstat

    def count_none(fd: int) -> os.stat_result:
        values = list(fstat(fd)[:10])
        values[3] = 0
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", count_none)
    write_file(tmp_path / "file", b"data", durable=False)
    assert (tmp_path / "file").read_bytes() == b"data"


# -- locks of NFS, which are those of fcntl


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an exclusive lock require a descriptor for writing, and a shared one for reading."""
    flock = fcntl.flock
    refused = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}

    def lock(fd: int, operation: int) -> None:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if refused.get(operation & ~fcntl.LOCK_NB) == mode:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock)


@pytest.mark.parametrize("readable_only", [False, True])
@pytest.mark.parametrize("locked", [False, True])
def test_locks_are_seen_on_nfs(
    opened: Any, nfs: None, locked: bool, readable_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fd, _ = opened
    if locked:
        assert file_system.lock(fd, fcntl.LOCK_EX)
    if readable_only:
        # Another user's file
        monkeypatch.setattr(file_system, "open_to_lock", os.open)
    assert file_system.is_file_locked(path, READ) == locked


@pytest.mark.parametrize("code", ["EACCES", "EAGAIN"])
def test_a_lock_of_another_process_on_a_share(
    opened: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, lock_file = getattr(errno, code), fcntl.flock

    def lock(fd: int, operation: int) -> None:
        if os.path.sameopenfile(fd, opened[1]):
            raise OSError(number, os.strerror(number))
        lock_file(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    assert file_system.is_file_locked(opened[0], READ)
    with pytest.raises(BlockingIOError):
        file_system.lock(opened[1], fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- files that are in use


@pytest.mark.parametrize("code", ["EBUSY", "ETXTBSY", "EACCES", "EPERM"])
def test_a_file_in_use_is_replaced_later(
    opened: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, directory = opened
    path.with_name("new").write_bytes(b"new")
    replace, refusals = os.replace, [code, code]
    pauses: list[float] = []

    def busy(*arguments: Any, **options: Any) -> None:
        if refusals:
            number = getattr(errno, refusals.pop())
            raise OSError(number, os.strerror(number))
        replace(*arguments, **options)

    monkeypatch.setattr(os, "replace", busy)
    monkeypatch.setattr(time, "sleep", pauses.append)
    directory.move("new", "file", directory)
    assert path.read_bytes() == b"new"
    assert len(pauses) == 2


def test_a_new_name_that_is_refused_is_an_error_at_once(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", lambda *_, **__: os.mkdir(opened[0]))  # noqa: PTH102
    with pytest.raises(FileExistsError):
        opened[2].move("file", "new", opened[2])


def test_a_file_that_another_host_replaces_is_read_again() -> None:
    stale = [OSError(errno.ESTALE, "Stale file handle")]

    def read() -> str:
        if stale:
            raise stale.pop()
        return "text"

    assert file_system.read_again(read) == "text"

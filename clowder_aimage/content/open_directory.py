"""Directories held by their descriptors: their files are created, linked and renamed.

Other users with write access can replace a path in a directory between two calls. A descriptor
remains the file or the directory that was opened. Names are therefore relative to an open
directory, links are not followed, and a file is compared with the open one before it is renamed.
Only this module and the modules named in ``tests/test_writes.py`` create files or change names.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from clowder_aimage.content import file_system

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# Attempts to empty a directory: a thread that is being stopped may still create a file.
_TRIES = 4
# On SMB a file cannot be replaced while another program has it open; nor on FUSE over such a share.
_BUSY = frozenset({errno.EBUSY, errno.ETXTBSY})
_SHARED = frozenset({errno.EACCES, errno.EPERM})
# Pauses in seconds before it is tried again: 1.3 seconds together; for a new name the first three.
_PAUSES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)


class OpenDirectory:
    """A directory until it is closed; ``path`` is for messages. Methods raise OSError.

    A name may have several components. None of them may be a link.
    """

    def __init__(self, path: str | Path, fd: int | None = None) -> None:
        """Open ``path``, following links, or take over the descriptor of a directory."""
        self.path = Path(path)
        self.fd = os.open(path, _DIRECTORY) if fd is None else fd

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def open_subdirectory(self, name: str) -> OpenDirectory:
        """Open a directory below this one."""
        fd = self.fd
        for segment in name.split("/"):
            try:
                inner = os.open(segment, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            finally:
                if fd != self.fd:
                    os.close(fd)
            fd = inner
        return OpenDirectory(self.path / name, fd)

    @contextmanager
    def _open_parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of the directory of ``name``, and the last component."""
        head, _, base = name.rpartition("/")
        if not head:
            yield self.fd, base
            return
        with self.open_subdirectory(head) as directory:
            yield directory.fd, base

    def create(self, name: str, mode: int = 0o666) -> int:
        """Create a file, and return its descriptor for writing."""
        with self._open_parent(name) as (fd, base):
            return os.open(base, _NEW, mode, dir_fd=fd)

    def open(self, name: str, flags: int = READ) -> int:
        """Open an existing file, and return its descriptor."""
        with self._open_parent(name) as (fd, base):
            return os.open(base, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)

    def read(self, name: str, limit: int) -> bytes:
        """Return up to ``limit`` bytes of a file in this directory itself."""
        # Bytes for which a read allocates memory: pass a limit near the size
        fd = os.open(name, READ, dir_fd=self.fd)
        try:
            return os.read(fd, limit)
        finally:
            os.close(fd)

    @contextmanager
    def open_to_lock(self, name: str) -> Iterator[int]:
        """Yield a descriptor of an existing entry that can test its lock."""
        fd = file_system.open_to_lock(name, READ, self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def stat(self, name: str) -> os.stat_result:
        """Return the status of a name, or of a link itself."""
        with self._open_parent(name) as (fd, base):
            return os.stat(base, dir_fd=fd, follow_symlinks=False)

    def make(self, name: str, mode: int = 0o777) -> None:
        """Create a directory and its parents, as far as they are missing."""
        path = ""
        for segment in filter(None, name.split("/")):
            path = f"{path}/{segment}" if path else segment
            with contextlib.suppress(FileExistsError), self._open_parent(path) as (fd, base):
                os.mkdir(base, mode, dir_fd=fd)

    def make_new(self, name: str, mode: int = 0o777) -> OpenDirectory:
        """Create a directory and open it."""
        os.mkdir(name, mode, dir_fd=self.fd)
        directory = self.open_subdirectory(name)
        if directory.list_names():
            os.close(directory.fd)
            raise _build_replacement_error(name)
        return directory

    def symlink(self, target: str, name: str) -> None:
        """Create a symbolic link."""
        with self._open_parent(name) as (fd, base):
            os.symlink(target, base, dir_fd=fd)

    def link(self, source: str, name: str) -> None:
        """Create a hard link to a file below this directory."""
        with (
            self._open_parent(source) as (old_dir, old_base),
            self._open_parent(name) as (new_dir, new_base),
        ):
            os.link(
                old_base, new_base, src_dir_fd=old_dir, dst_dir_fd=new_dir, follow_symlinks=False
            )

    def link_from(self, source: str | Path, name: str) -> io.FileIO:
        """Create a hard link to a file elsewhere, and open the link.

        ``source`` may become another file at any time. The returned file is the linked one.
        """
        with self._open_parent(name) as (fd, base):
            os.link(source, base, dst_dir_fd=fd, follow_symlinks=False)
        try:
            linked = self.open(name)
            if stat.S_ISREG(os.fstat(linked).st_mode):
                return io.FileIO(linked)
            os.close(linked)
            raise OSError(errno.EINVAL, "not a regular file", str(source))
        except BaseException:
            self.remove(name)
            raise

    def rename(
        self, opened: os.stat_result, name: str, new: str, into: OpenDirectory | None = None
    ) -> None:
        """Rename the file ``opened`` from ``name`` to ``new``, replacing that."""
        rename_opened(opened, name, new, self.fd, (into or self).fd)

    def move(self, name: str, new: str, into: OpenDirectory) -> None:
        """Rename an unopened entry."""
        _replace(name, new, self.fd, into.fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists; ignore errors."""
        with contextlib.suppress(OSError):
            self.unlink(name)

    def unlink(self, name: str) -> None:
        """Remove a file."""
        with self._open_parent(name) as (fd, base):
            unlink(base, fd)

    def remove_tree(self, name: str) -> None:
        """Remove a directory with its contents; ignore errors."""
        with contextlib.suppress(OSError):
            with self.open_subdirectory(name) as directory:
                directory.clear()
            os.rmdir(name, dir_fd=self.fd)

    def clear(self) -> None:
        """Remove the contents; ignore errors."""
        for _ in range(_TRIES):
            for name in (names := self.list_names()):
                self.remove(name)
                import shutil

                # The name may be a directory.
                shutil.rmtree(name, ignore_errors=True, dir_fd=self.fd)
            if not names:
                return

    def list_names(self) -> list[str]:
        """Return the names in the directory, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 - a descriptor

    def sync(self) -> None:
        """Make renames into the directory durable, as far as the file system can."""
        file_system.sync_directory(self.fd, self.path)


def rename_opened(
    opened: os.stat_result,
    path: str,
    new: str,
    old_dir: int | None = None,
    new_dir: int | None = None,
) -> None:
    """Rename ``path`` to ``new`` if it is the file ``opened``, see fstat. Raises OSError else."""
    status = os.stat(path, dir_fd=old_dir, follow_symlinks=False)
    if not os.path.samestat(status, opened):
        raise _build_replacement_error(path)
    _replace(path, new, old_dir, new_dir)


def _replace(name: str, new: str, directory: int | None, into: int | None) -> None:
    """Rename a file, replacing ``new``; wait a moment for a program that has that open on a share.

    Raises OSError.
    """
    _attempt_again(
        lambda: os.replace(name, new, src_dir_fd=directory, dst_dir_fd=into),
        _BUSY | _SHARED,
        lambda: _PAUSES if _exists(new, into) else _PAUSES[:3],
    )


def unlink(path: str | Path, directory: int | None = None) -> None:
    """Remove a name; wait a moment for a program that has it open on a share. Raises OSError."""
    _attempt_again(lambda: os.unlink(path, dir_fd=directory), _BUSY, lambda: _PAUSES[:3])


def _attempt_again(
    call: Callable[[], object], codes: frozenset[int], choose: Callable[[], Sequence[float]]
) -> None:
    """Make a call, again after each pause while it fails with these codes. Raises OSError."""
    pauses: Iterator[float] | None = None
    while True:
        try:
            call()
        except OSError as error:
            pauses = iter(choose()) if pauses is None else pauses
            pause = next(pauses, None)
            if error.errno not in codes or pause is None:
                raise
            time.sleep(pause)
        else:
            return


def _exists(name: str, directory: int | None) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def move(path: Path, new: Path) -> None:
    """Rename a file of a store to ``new``, replacing that. Raises OSError."""
    with OpenDirectory(path.parent) as directory, OpenDirectory(new.parent) as into:
        directory.move(path.name, new.name, into)


def _build_replacement_error(name: str) -> OSError:
    return OSError(errno.ESTALE, "another program has replaced it meanwhile", name)


def is_trusted(owner: int) -> bool:
    """Return True if a user may change files of this process: this user or root."""
    return owner in (0, os.geteuid())


def is_own(owner: int, directory: str) -> bool:
    """Return True if a file of that owner in a directory may be one that this process created.

    NFS with all_squash, and mounts with the option uid, give all files one owner.
    """
    return os.geteuid() in (0, owner) or owner == _find_new_owner(directory)


@functools.lru_cache(maxsize=16)
def _find_new_owner(directory: str) -> int:
    name = f".owner.{os.urandom(8).hex()}"
    with OpenDirectory(directory) as opened:
        fd = opened.create(name)
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
            opened.remove(name)


def is_protected(file: io.FileIO, directory: Path) -> bool:
    """Return True if an open file and its directory can be written by trusted users alone."""
    status = os.fstat(file.fileno())
    is_private = is_trusted(status.st_uid) and not status.st_mode & _WRITABLE_BY_OTHERS
    return is_private and is_trusted(directory.stat().st_uid)


def resolve(path: Path) -> Path:
    """Return a path without links. Raises PermissionError if it is another user's link."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and not is_trusted(status.st_uid):
            raise PermissionError(errno.EACCES, "it is another user's link", str(path))
    return Path(os.path.realpath(path))


def open_special(path: Path) -> BinaryIO:
    """Open an existing named pipe or device for writing. Raises OSError for a regular file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _build_replacement_error(str(path))
    return os.fdopen(fd, "wb", buffering=0)

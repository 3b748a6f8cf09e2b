"""Locks between processes, and files that a group may share.

Locks are ``flock``: they go with the process, however that ends. Some network file systems do not
have them; then every process goes on as if it were alone, and what it publishes is verified all
the same (docs/operations.md says what that costs).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from clowder_aimage.content.atomic_file import flock, is_locked, sync_directory
from clowder_aimage.errors import StoreError
from clowder_aimage.layout.os_error import store_errors

PRIVATE = ".aimage"  # the directory of a store that only we need
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MOMENT = 0.01  # seconds
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def locks_work(root: Path) -> bool:
    """Whether locks do anything in the store; True where we cannot try."""
    try:
        with held(root, "lock", shared=True):
            return is_locked(root / PRIVATE / "lock")
    except StoreError:
        return True


@contextlib.contextmanager
def held(root: Path, name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold the store's lock of that name. Raises StoreError."""
    with store_errors(root):
        make_directory(root, PRIVATE)
        fd = open_shared(root / PRIVATE / name)
    try:
        with store_errors(root):
            flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def open_shared(path: str | Path, flags: int = _FLAGS) -> int:
    """Open or make a file that everyone who may write its directory may write, too."""
    try:
        return os.open(path, flags & ~os.O_CREAT)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        fd = os.open(path, flags | os.O_EXCL, 0o600)
    except FileExistsError:  # another has just made it, and shares it in a moment
        time.sleep(_MOMENT)
        return os.open(path, flags & ~os.O_CREAT)
    share(fd, os.path.dirname(path))
    return fd


def open_plain(path: str | Path) -> int:
    """Open a file to read it. A link, a pipe or the like in its place is as good as nothing: it
    leads who knows where, or nowhere. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return fd


def check_own(root: Path, *kind: str) -> str:
    """The path of a directory of ours, there or not. Raises StoreError where a link leads to it:
    what is removed and written there must be ours."""
    path = os.path.join(root, PRIVATE)
    for name in ("", *kind):
        path = os.path.join(path, name) if name else path
        if os.path.islink(path):
            raise StoreError(
                f"{path} is a link, and what it leads to may be anybody's",
                hint="remove the link; aimage makes the directory when it needs it",
            )
    return path


def share(fd: int, directory: str | Path, wanted: int = 0o660) -> None:
    """Give a new file to the group of a directory that is a group's (setgid, writable)."""
    mode = os.stat(directory).st_mode
    if mode & stat.S_ISGID and mode & stat.S_IWGRP:
        with contextlib.suppress(PermissionError):  # another has made it, and does this
            os.fchmod(fd, wanted)


def make_directory(root: Path, *names: str) -> Path:
    """Make ``root/names...`` where it is not there. In a group's store it is the group's."""
    if names[0] == PRIVATE:
        check_own(root, *names[1:])
    path = root.joinpath(*names)
    if path.is_dir():
        return path
    if not root.is_dir():
        new = [place for place in (root, *root.parents) if not place.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for place in new:
            sync_directory(place.parent)
    wanted = stat.S_IMODE(root.stat().st_mode)
    part = root
    for name in names:
        part = part / name
        with contextlib.suppress(FileExistsError):
            part.mkdir()
            if wanted & stat.S_ISGID and wanted & stat.S_IWGRP:
                part.chmod(wanted)
            sync_directory(part.parent)
    return path

"""Files and directories made below the directory of an export: new, or shared with a blob.

A reflink (Linux, ``ioctl_ficlone(2)``) is a file of its own that shares blocks until one of both is
written to. A hard link is the blob by another name: read-only, and never to be written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from enum import StrEnum
from pathlib import Path

from clowder_aimage.exporter.directory import DIRECTORY_MODE, FILE_MODE

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def new_file(path: Path, mode: int = FILE_MODE) -> int:
    """Return a file that was not there, open to be written. Raises OSError."""
    return os.open(path, _FLAGS, mode)


def make_directories(root: Path, name: str) -> None:
    """Make ``root/name`` and what it lies in, where they are not there. Raises OSError."""
    path = root
    for part in filter(None, name.split("/")):
        path = path / part
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=DIRECTORY_MODE)


_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)


class LinkMethod(StrEnum):
    """The way that a whole file came into the directory."""

    COPIED = "copied"
    REFLINKED = "reflinked"
    HARD_LINKED = "hardLinked"


def link(blob: Path, target: Path) -> LinkMethod | None:
    """Let ``target``, which does not exist, share the bytes of ``blob``; None where it cannot."""
    if _reflink(blob, target):
        return LinkMethod.REFLINKED
    try:
        os.link(blob, target)
    except OSError:  # another file system, one without links, or too many of them
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

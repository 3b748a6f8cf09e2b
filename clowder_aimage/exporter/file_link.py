"""A file that shares its bytes with a blob.

A reflink where the file system has them, else a hard link.

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

from clowder_aimage.exporter.directory import FILE_MODE

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

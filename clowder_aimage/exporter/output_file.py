"""Files and directories that are made below a directory of ours."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from clowder_aimage.exporter.directory import DIRECTORY_MODE, FILE_MODE

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def new_file(path: Path, mode: int = FILE_MODE) -> int:
    """A file that was not there, open to be written. Raises OSError."""
    return os.open(path, _FLAGS, mode)


def write_all(file: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of ``data``: at ``offset``, or where the file is. Raises OSError."""
    view = memoryview(data)
    while view:
        if offset is None:
            count = os.write(file, view)
        else:
            count = os.pwrite(file, view, offset)
            offset += count
        view = view[count:]


def make_directories(root: Path, name: str) -> None:
    """Make ``root/name`` and what it lies in, where they are not there. Raises OSError."""
    path = root
    for part in filter(None, name.split("/")):
        path = path / part
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=DIRECTORY_MODE)

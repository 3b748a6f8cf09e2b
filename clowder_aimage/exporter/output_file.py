"""Files and directories that are made below a directory of ours."""

from __future__ import annotations

import contextlib
import os
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

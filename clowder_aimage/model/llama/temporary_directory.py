"""Directories for the files of a process, which need a place that can be written.

A process that is killed leaves its directory, and the next one removes it: while a process lives,
it holds a lock on its directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clowder_aimage.content.file_system import lock
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.errors import StoreError

_PREFIX = "aimage-load-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
# All that is written there: a directory with another file is of another program
_FILES = re.compile(r"-?1\.sock|log|[a-z0-9-]+\.gguf")
# Bytes of a directory: with the name of a socket, macOS allows 103 for its path
_MAX_DIRECTORY = 95
_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


@contextlib.contextmanager
def create_temporary_directory() -> Iterator[str]:
    """Create a directory with a short path that only this user can enter, until the context ends.

    Those of processes that were killed are removed. Raises StoreError: there is no place that can
    be written, as on a read-only root without a /tmp.
    """
    with contextlib.ExitStack() as stack:
        try:
            place = tempfile.gettempdir()
            if len(os.fsencode(place)) + len(_PREFIX) + 9 > _MAX_DIRECTORY:
                place = "/tmp"  # noqa: S108 - a directory of its own in it
            parent = stack.enter_context(OpenDirectory(place))
            remove_abandoned(parent)
            path = _make_locked(parent, stack)
        except OSError as error:
            raise StoreError(
                f"cannot create a temporary directory: {error.strerror or error}",
                hint="name a directory that can be written in the variable TMPDIR",
            ) from None
        # Before its lock ends
        stack.callback(parent.remove_tree, path.name)
        yield str(path)


def _make_locked(parent: OpenDirectory, stack: contextlib.ExitStack) -> Path:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent.path))
        # Another process may remove it before it is locked
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            directory = stack.enter_context(parent.open_subdirectory(path.name))
            lock(directory.fd, _NOW)
            parent.stat(path.name)
            return path


def remove_abandoned(parent: OpenDirectory) -> None:
    """Remove the directories of this user's processes that have ended."""
    for name in parent.list_names():
        if _NAME.fullmatch(name):
            # Of another user, a link, or in use
            with contextlib.suppress(OSError), parent.open_subdirectory(name) as directory:
                status = os.fstat(directory.fd)
                is_ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
                # Without locks it may be in use
                if is_ours and lock(directory.fd, _NOW):
                    for file in filter(_FILES.fullmatch, directory.list_names()):
                        directory.unlink(file)
                    os.rmdir(name, dir_fd=parent.fd)

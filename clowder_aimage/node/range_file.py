"""Ranges that this node has fetched for its neighbours, in files of this process alone.

They lie in ``.aimage/range/<id of the process>``, which is locked as long as the process lives.
What they are is known in memory only: what a killed process leaves is never read, and goes when
the next one begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import re
import shutil
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from clowder_aimage.content.atomic_file import flock
from clowder_aimage.errors import StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    make_directory,
    open_regular,
    store_errors,
)
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Digest

LIMIT = 2 * 1024**3  # bytes
SPARED = 1024**3  # bytes that are left free: a pull needs them more
_KIND = "range"
_ROOM = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    length: int
    digest: bytes


class RangeFile:
    """Threads may share it. Where the directory cannot be made, or the disk is full, nothing is
    kept, and that is all."""

    def __init__(
        self, layout: ImageLayout, node: str, *, limit: int = LIMIT, spared: int = SPARED
    ) -> None:
        self._layout, self._node = layout, node
        self._limit, self._spared = limit, spared
        self._lock = threading.Lock()
        self._files: OrderedDict[BlobRange, _File] = OrderedDict()
        self._names = itertools.count()
        self._size = 0
        self._fd = -1

    def start(self) -> None:
        """Remove what killed processes left, and make the directory."""
        with contextlib.suppress(OSError, StoreError):
            self._fd = self._make()

    def close(self) -> None:
        """Remove the directory."""
        with self._lock:
            fd, self._fd = self._fd, -1
            self._files.clear()
            self._size = 0
        if fd >= 0:
            with contextlib.suppress(OSError, StoreError):
                _remove(Path(check_own(self._layout.root, _KIND)) / self._node)
            os.close(fd)

    @property
    def size(self) -> int:
        """The bytes that they take."""
        return self._size

    def add(self, part: BlobRange, data: bytes | bytearray, digest: bytes) -> bool:
        """Keep a range; the oldest ones go for it. Whether it is kept."""
        if self._fd < 0 or part.length > self._limit:
            return False
        with contextlib.suppress(OSError, StoreError):
            if shutil.disk_usage(self._layout.root).free < self._spared + part.length:
                return False
            path = os.path.join(
                check_own(self._layout.root, _KIND), self._node, str(next(self._names))
            )
            _write(path, data)
            with self._lock:
                old = self._files.pop(part, None)
                self._files[part] = _File(path, part.length, digest)
                self._size += part.length - (old.length if old else 0)
                gone = [old] if old else []
                while self._size > self._limit:
                    gone.append(self._pop(next(iter(self._files))))
            _unlink(gone)
            return True
        return False

    def open(self, part: BlobRange) -> tuple[BinaryIO, bytes] | None:
        """A range's file and its SHA-256. The file stays readable when it is removed."""
        with self._lock:
            found = self._files.get(part)
        if found is None:
            return None
        try:
            return cast(BinaryIO, io.FileIO(open_regular(found.path))), found.digest
        except OSError:  # another process has cleared it away
            self._drop([part])
            return None

    def forget(self, digest: Digest) -> None:
        """Remove the ranges of a blob."""
        with self._lock:
            parts = [part for part in self._files if part.digest == digest]
        self._drop(parts)

    def tidy(self) -> None:
        """Remove the ranges of blobs that are in the layout by now."""
        with self._lock:
            blobs = {part.digest: part for part in self._files}
        for digest, part in blobs.items():
            if self._layout.exists(part.content):
                self.forget(digest)

    def clear(self) -> None:
        """Remove all: the disk is wanted for something better."""
        with self._lock:
            parts = list(self._files)
        self._drop(parts)

    def _drop(self, parts: list[BlobRange]) -> None:
        with self._lock:
            gone = [self._pop(part) for part in parts if part in self._files]
        _unlink(gone)

    def _pop(self, part: BlobRange) -> _File:
        file = self._files.pop(part)
        self._size -= file.length
        return file

    def _make(self) -> int:
        """Our directory, open and locked."""
        root = self._layout.root
        with store_errors(root):
            for path in make_directory(root, PRIVATE, _KIND).iterdir():
                if _ROOM.fullmatch(path.name):
                    _remove_idle(path)
            while True:  # another process may take it for a dead one's until it is locked
                path = make_directory(root, PRIVATE, _KIND, self._node)
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                flock(fd, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if os.fstat(fd).st_ino == path.stat().st_ino:
                        return fd
                os.close(fd)


def _write(path: str, data: bytes | bytearray) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise
    finally:
        os.close(fd)


def _remove_idle(path: Path) -> None:
    """Remove the directory of a process that is no more."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def _unlink(files: list[_File]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            Path(file.path).unlink()

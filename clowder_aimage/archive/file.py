"""The file that an archive is written to: there whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.content.atomic_file import flock, is_locked, sync_directory
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, UsageError
from clowder_aimage.layout.direct_io import DirectFile
from clowder_aimage.layout.lock import open_regular
from clowder_aimage.oci import Digest

_PARTING = 1.0  # seconds that a write under way gets when the rest has failed
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def whole_file(path: Path, size: int, *, hashed: bool) -> Iterator[Writer]:
    """A file of ``size`` bytes to write. It is called ``path`` once the block has ended well and
    its bytes are on the disk; else nothing of it stays, and what was there does.

    A link is followed. What is no regular file (a named pipe, a device) is written as it is.

    Raises:
        UsageError: ``path`` is a directory.
        NoSpaceError: it cannot fit; nothing was written.
        StoreError: it cannot be written.
    """
    with _faults(path):
        final = Path(os.path.realpath(path))  # a link to a file stays one
        mode = final.stat().st_mode if final.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise UsageError(f"{path} is a directory", hint=f"name a file in it: {path}/NAME.tar")
        if mode is not None and not stat.S_ISREG(mode):
            with final.open("wb", buffering=0) as pipe, Writer(pipe, path, hashed=hashed) as writer:
                yield writer
            return
        if not final.parent.is_dir():
            raise StoreError(f"there is no directory {path.parent}")
        temporary, file = _new(final)
    with _beside(path, final, temporary, file):
        _remove_leftovers(final, temporary)
        with _faults(path):
            free = shutil.disk_usage(final.parent).free
        if size > free:
            raise NoSpaceError(
                f"the archive has {size} bytes, and {path.parent} has room for {free}",
                hint="free some space, or write it to another disk",
            )
        direct = DirectFile(str(temporary))
        with Writer(file, path, hashed=hashed, direct=direct) as writer:
            yield writer
        if mode is not None:
            with _faults(path):
                os.fchmod(file.fileno(), stat.S_IMODE(mode))


def _prefix(final: Path) -> str:
    """What the names of files begin with that shall become ``final``."""
    return f".{final.name[:100]}."


def _new(final: Path) -> tuple[Path, BinaryIO]:
    """A new file beside ``final``, locked as long as it is open. Raises OSError."""
    while True:
        path = final.with_name(f"{_prefix(final)}{secrets.token_hex(4)}")
        file = path.open("xb", buffering=0)
        flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # it was taken for a leftover before it was locked


def _remove_leftovers(final: Path, temporary: Path) -> None:
    """Remove what killed processes have left beside ``final``: what nobody has locked, where our
    own ``temporary`` shows that locks work. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        if not is_locked(temporary):
            return
        for path in final.parent.iterdir():
            if re.fullmatch(re.escape(_prefix(final)) + "[0-9a-f]{8}", path.name):
                with contextlib.suppress(OSError):
                    _remove_idle(path)


def _remove_idle(path: Path) -> None:
    fd = open_regular(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(fd)


@contextmanager
def _beside(path: Path, final: Path, temporary: Path, file: BinaryIO) -> Iterator[None]:
    """Give ``temporary``, which is open as ``file``, its name when the block has ended well."""
    try:
        with file:
            yield
            with _faults(path):
                os.fsync(file.fileno())
                temporary.replace(final)  # while it is locked: it is no leftover
                sync_directory(final.parent)
    finally:
        with contextlib.suppress(OSError):  # why it was not finished is worth more
            temporary.unlink(missing_ok=True)


@contextmanager
def _faults(path: Path | str) -> Iterator[None]:
    """Turn an OSError about the archive into an error for people."""
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: Path | str) -> AImageError:
    if error.errno in _FULL:
        return NoSpaceError(
            f"no space left for the archive {path}",
            hint="free some space, or write it to another disk",
        )
    if error.errno == errno.EPIPE:
        return StoreError("whoever reads the archive has gone before its end")
    return StoreError(f"cannot write the archive {path}: {error.strerror or error}")


class Writer:
    """Bytes on their way into ``file``, an unbuffered stream that errors call ``name``.

    They gather in a buffer, which goes out on a thread of its own while the next one is filled. It
    goes past the page cache where there is a ``direct`` way into the file, which has to be a new
    one then. A context: all is out when it ends well.
    """

    def __init__(
        self,
        file: BinaryIO,
        name: Path | str,
        *,
        hashed: bool = False,
        direct: DirectFile | None = None,
    ) -> None:
        self._file = file
        self._name = name
        self._hasher = hashlib.sha256() if hashed else None
        self._direct = direct
        self._buffers = [new_buffer(), new_buffer()]  # to fill, and on its way out
        self._filled = self._offset = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="aimage-archive")
        self._pending: Future[None] | None = None

    @property
    def room(self) -> memoryview:
        """Where the next bytes go: to be filled from the front, and then to be said by ``filled``.
        It is never empty."""
        return self._buffers[0][self._filled :]

    def filled(self, count: int) -> None:
        """``count`` bytes of ``room`` are to be written.

        Raises:
            NoSpaceError, StoreError: what was given before could not be written.
        """
        self._filled += count
        if self._filled == len(self._buffers[0]):
            self._flush()

    def write(self, data: bytes) -> None:
        """Write what is in memory already. Raises as ``filled`` does."""
        view = memoryview(data)
        while view:
            count = min(len(view), len(self.room))
            self.room[:count] = view[:count]
            self.filled(count)
            view = view[count:]

    def _flush(self) -> None:
        self._wait()
        view = self._buffers[0][: self._filled]
        self._pending = self._pool.submit(self._put, view, self._offset)
        self._offset += self._filled
        self._filled = 0
        self._buffers.reverse()

    def _put(self, view: memoryview, offset: int) -> None:
        writing = self._direct.begin(offset, view) if self._direct else None
        if self._hasher is not None:
            self._hasher.update(view)
        with _faults(self._name):
            done = writing.result() if writing else 0
            while done < len(view):
                if self._direct:  # the file does not know how far the direct way has come
                    done += os.pwrite(self._file.fileno(), view[done:], offset + done)
                else:
                    done += self._file.write(view[done:])

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    @property
    def digest(self) -> Digest | None:
        """Of all that was written, once the context has ended; None where none was asked for."""
        return Digest("sha256", self._hasher.hexdigest()) if self._hasher else None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                self._wait()
        finally:
            self._pool.shutdown(wait=False)
            if self._pending is not None:  # a pipe that nobody reads must not hold the user up
                wait([self._pending], timeout=_PARTING)
            if self._direct:
                self._direct.close()

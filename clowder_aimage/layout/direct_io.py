"""Direct I/O: writes that bypass the page cache.

It saves a copy, evicts no pages that a running model has mapped, and overlaps writing with hashing.
A disk is fast only while it has several writes to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from collections.abc import Callable

from clowder_aimage.content.buffer import PAGE

_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
# macOS has no O_DIRECT.
_DIRECT = getattr(os, "O_DIRECT", 0)
# Another alignment is needed, only some files have direct I/O (FUSE), or the lock of the first
# descriptor keeps out the second one (SMB).
_REFUSALS = {
    *(errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF),
    *(errno.EACCES, errno.EPERM),
}
# Bytes. The page cache is faster for smaller writes.
_MIN_SIZE = 64 * 1024
# Called in another thread with the number of bytes that were written, or with the error.
OnWritten = Callable[[int | OSError], None]
# Threads that write at the same time: more would only wait for the disk.
_THREADS = 8


class DirectFile:
    """A second descriptor of the file at ``path``, for direct I/O. Threads may share it."""

    def __init__(self, path: str, *, is_usable: bool = True) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._is_usable = is_usable and bool(_DIRECT)
        self._pending = 0
        self._is_idle = threading.Condition(self._lock)

    def begin(self, offset: int, view: memoryview, on_written: OnWritten) -> bool:
        """Begin to write the aligned part of ``view``, which must not change before its end.

        Return False if direct I/O is not possible or too slow.
        """
        size = len(view) & -PAGE
        if size < _MIN_SIZE or offset % PAGE or not self._is_usable or not _is_aligned(view):
            return False
        with self._lock:
            if not self._open():
                return False
            self._pending += 1

        def write() -> None:
            try:
                on_written(self._attempt(view[:size], offset))
            finally:
                self._end()

        is_begun = _writers.submit(write)
        if not is_begun:
            self._end()
        return is_begun

    def _end(self) -> None:
        with self._lock:
            self._pending -= 1
            if not self._pending:
                self._is_idle.notify_all()

    def _attempt(self, view: memoryview, offset: int) -> int | OSError:
        try:
            return self._write(view, offset)
        except OSError as error:
            return error

    def _open(self) -> bool:
        if self._fd < 0 and self._is_usable:
            try:
                self._fd = os.open(self._path, _FLAGS | _DIRECT)
            except OSError:
                # The write through the cache will report the error, if any.
                self._is_usable = False
        return self._is_usable

    def _write(self, view: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._fd, view, offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            # The cache is used from now on.
            self._is_usable = False
            return 0

    def close(self) -> None:
        """Wait for pending writes and close the file."""
        with self._lock:
            self._is_usable = False
            while self._pending:
                self._is_idle.wait()
            fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class _Writers:
    """Threads that run calls, as many as are needed at the same time. They end with the process.

    A pool of concurrent.futures takes as long for a call as a fast disk for the write.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._busy = 0

    def submit(self, call: Callable[[], None]) -> bool:
        """Run a call in a thread; return False if the system has no thread for it."""
        with self._lock:
            if self._threads < min(self._busy + 1, _THREADS):
                try:
                    threading.Thread(target=self._run, name="aimage-write", daemon=True).start()
                    self._threads += 1
                except RuntimeError:
                    if not self._threads:
                        return False
            self._busy += 1
        self._calls.put(call)
        return True

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            finally:
                # The buffer may be unmapped
                del call
                with self._lock:
                    self._busy -= 1


_writers = _Writers()


def _is_aligned(view: memoryview) -> bool:
    import ctypes

    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0
    except TypeError:
        # A read-only buffer is not one of new_buffer, which is aligned.
        return False

"""Direct I/O: writes that bypass the page cache.

It saves a copy, evicts no pages that a running model has mapped, and overlaps writing with hashing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from typing import TYPE_CHECKING

from clowder_aimage.content.buffer import PAGE

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

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
# Maximum connections of a download
_THREADS = 64


class DirectFile:
    """A second descriptor of the file at ``path``, for direct I/O. Threads may share it."""

    def __init__(self, path: str, *, is_usable: bool = True) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._is_usable = is_usable and bool(_DIRECT)
        self._pending: set[Future[int]] = set()

    def begin(self, offset: int, view: memoryview) -> Future[int] | None:
        """Begin to write the aligned part of ``view``.

        Return a future of the byte count, or None if direct I/O is not possible or too slow. The
        view must not change before the write ends.
        """
        size = len(view) & -PAGE
        if size < _MIN_SIZE or offset % PAGE or not self._is_usable or not _is_aligned(view):
            return None
        with self._lock:
            if not self._open():
                return None
            future = _get_executor().submit(self._write, view[:size], offset)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

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
            if not self._pending and self._fd < 0:
                return
            from concurrent.futures import wait

            wait(list(self._pending))
            fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


@functools.cache
def _get_executor() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_THREADS, thread_name_prefix="aimage-write")


def _is_aligned(view: memoryview) -> bool:
    import ctypes

    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0
    except TypeError:
        # A read-only buffer is not one of new_buffer, which is aligned.
        return False

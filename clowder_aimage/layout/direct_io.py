"""Writing past the page cache.

Bytes that are hashed from a writer's buffer are not read again soon. Straight to the disk they cost
no copy and push nothing out of memory that a running model has mapped, and the disk takes them
while they are hashed. Where a file system or a platform cannot, the ordinary way remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from clowder_aimage.content.buffer import PAGE

_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
_LEAST = 64 * 1024  # bytes below which the cache is quicker
_THREADS = 64  # as many as connections can be


class DirectFile:
    """A second way into the file at ``path``. Threads may share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._is_usable = bool(_DIRECT)
        self._under_way: set[Future[int]] = set()

    def begin(self, offset: int, view: memoryview) -> Future[int] | None:
        """Begin to write what can be of ``view``, which must stay as it is until that is done.

        Returns:
            how many bytes were written, in time; None where it is not worth it or cannot be.
        """
        size = len(view) & -PAGE
        if size < _LEAST or offset % PAGE or not self._is_usable or not _is_aligned(view):
            return None
        with self._lock:
            if not self._open():
                return None
            future = _writers().submit(self._write, view[:size], offset)
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _open(self) -> bool:
        if self._fd < 0 and self._is_usable:
            try:
                self._fd = os.open(self._path, _FLAGS | _DIRECT)
            except OSError:  # the ordinary way says what is wrong, if anything is
                self._is_usable = False
        return self._is_usable

    def _write(self, view: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_usable = False  # the disk wants other addresses than those of pages
            return 0

    def close(self) -> None:
        """Close it, once nothing is under way."""
        with self._lock:
            self._is_usable = False
            wait(list(self._under_way))
            fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


@functools.cache
def _writers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="aimage-write")


def _is_aligned(view: memoryview) -> bool:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0
    except TypeError:  # it is read-only: not one of our buffers
        return False

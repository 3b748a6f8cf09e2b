"""A file mapped into memory without an open descriptor.

Python's own ``mmap`` keeps a descriptor for as long as it lives (to 3.12), and a model has more
tensors than a process may have open files. So this calls mmap(2) itself. The pages are private:
writes to them change neither the file nor other mappings.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

from clowder_aimage.errors import StoreError

_FAILED = ctypes.c_void_p(-1).value


def map_file(path: str) -> Any:
    """Map the whole file as a writable buffer, until it is no longer referenced.

    Raises:
        StoreError: it cannot be opened or mapped, or is empty.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(handle).st_size
            address = _map(handle, size)
        finally:
            os.close(handle)
    except OSError as error:
        raise StoreError(f"{path} cannot be mapped: {error.strerror or error}") from None
    buffer = (ctypes.c_char * size).from_address(address)
    unmapping = weakref.finalize(buffer, _library().munmap, address, size)
    unmapping.atexit = False  # at the end of the process somebody may still look
    return buffer


def _map(handle: int, size: int) -> int:
    address = _library().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, handle, 0
    )
    if address in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_longlong,  # off_t, on every 64-bit system
    )
    library.munmap.restype = ctypes.c_int
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library

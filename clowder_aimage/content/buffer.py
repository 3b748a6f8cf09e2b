"""Buffers for reading and writing."""

from __future__ import annotations

import mmap

CHUNK_SIZE = 1024 * 1024
# Bytes of the largest read of a copy: a buffer costs its threads the same whatever its size.
LARGEST_READ = 2 * CHUNK_SIZE
PAGE = 4096


def new_buffer(size: int = CHUNK_SIZE) -> memoryview:
    """Return a page-aligned buffer, as direct I/O requires."""
    return memoryview(mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

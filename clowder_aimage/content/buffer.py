"""Buffers that bytes pass through."""

from __future__ import annotations

import mmap

CHUNK_SIZE = 1024 * 1024
PAGE = 4096


def new_buffer(size: int = CHUNK_SIZE) -> memoryview:
    """``size`` bytes that begin at a page, as disks want what is written past the cache."""
    return memoryview(mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

"""Whole files compressed on their way in: gzip (RFC 1952) and zstd (RFC 8878).

Weights hardly get smaller, so this is done only when it is asked for. A gzip header of our own says
neither time nor system; how well bytes are packed still depends on the library, so another machine
may give another digest. What the layer unpacks to is recorded, and that does not depend on it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Protocol

from clowder_aimage.content.decompress import zstandard_package

_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_GZIP_LEVEL, _ZSTD_LEVEL = 6, 3


class Compressor(Protocol):
    """Bytes in, fewer bytes out."""

    def compress(self, data: memoryview, /) -> bytes: ...

    def flush(self) -> bytes:
        """Return the last bytes, when all input was given."""
        ...


def compressor(name: str, size: int) -> Compressor:
    """Return a compressor for ``size`` bytes, by its word in a media type. Raises UsageError."""
    return _Gzip() if name == "gzip" else _zstd(size)


def check_compression(name: str) -> None:
    """Check that the package it needs is installed. Raises UsageError."""
    if name == "zstd":
        zstandard_package()


class _Gzip:
    def __init__(self) -> None:
        self._deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._checksum = 0
        self._size = 0
        self._header = _GZIP_HEADER

    def compress(self, data: memoryview, /) -> bytes:
        self._checksum = zlib.crc32(data, self._checksum)
        self._size += len(data)
        header, self._header = self._header, b""
        return header + self._deflate.compress(data)

    def flush(self) -> bytes:
        end = struct.pack("<II", self._checksum, self._size & 0xFFFFFFFF)
        return self._header + self._deflate.flush() + end


def _zstd(size: int) -> Compressor:
    made: Compressor = zstandard_package().ZstdCompressor(level=_ZSTD_LEVEL).compressobj(size=size)
    return made

"""Bodies that a proxy has compressed, although no request accepts that (RFC 9110, 8.4).

A body is decoded in pieces of bounded size, and its content is verified by its digest as any other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

_CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
_BLOCK = 16 * 1024
# The header of gzip or of zlib is recognised.
_ANY_HEADER = 32 + zlib.MAX_WBITS


def parse_coding(headers: Mapping[str, str]) -> str:
    """Return the codings of a body, an empty text for none."""
    names = (name.strip().lower() for name in headers.get("Content-Encoding", "").split(","))
    return ", ".join(name for name in names if name not in ("", "identity"))


def is_supported(coding: str) -> bool:
    """Return True if bodies with this coding can be decoded."""
    return coding in _CODINGS


class BodyDecoder:
    """The content of a compressed body, which ``read`` returns in pieces of up to a size."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._frame = zlib.decompressobj(_ANY_HEADER)
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes; none at the end. Raises ValueError for a damaged body."""
        while packed := self._rest or self._read(_BLOCK):
            if self._frame.eof:
                # gzip may have several members (RFC 1952, 2.2).
                self._frame = zlib.decompressobj(_ANY_HEADER)
            try:
                plain = self._frame.decompress(packed, size)
            except zlib.error as error:
                raise ValueError(f"the compressed body is damaged ({error})") from None
            self._rest = self._frame.unused_data or self._frame.unconsumed_tail
            if plain:
                return plain
        if not self._frame.eof:
            raise ValueError("the compressed body is truncated")
        return b""

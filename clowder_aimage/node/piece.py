"""A range that is here: to be sent, or for a pull of our own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from clowder_aimage.node.rendezvous import BlobRange

_BLOCK = 1024 * 1024


@dataclass(eq=False)
class Piece:
    """A range to be sent, and its SHA-256: ``length`` bytes of ``file`` from ``offset`` on, or
    ``data`` in memory."""

    digest: bytes
    length: int
    file: BinaryIO | None = None
    offset: int = 0
    data: bytes | bytearray = b""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


@dataclass(eq=False)
class LoadedPiece:
    """A range in memory, for a pull of our own. ``release(is_used)`` when that is done with it: in
    full, or not."""

    data: bytes | bytearray
    digest: bytes
    release: Callable[[bool], None] = lambda _: None


def hashed(file: BinaryIO, part: BlobRange) -> bytes | None:
    """The SHA-256 of a range in the file of its blob; None where the file is too short."""
    hasher, at = hashlib.sha256(), part.start
    while at < part.end:
        block = os.pread(file.fileno(), min(_BLOCK, part.end - at), at)
        if not block:
            return None
        hasher.update(block)
        at += len(block)
    return hasher.digest()

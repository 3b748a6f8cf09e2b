"""Ranges of a blob, and the nodes that own them.

Rendezvous hashing (highest random weight; D. Thaler, C. Ravishankar, "Using name-based mappings
to increase hit rates", IEEE/ACM ToN 6(1), 1998): every node weighs every other by a hash, so all
that know the same nodes agree on the owner without a message. If a node joins or leaves, only the
ranges that it owns move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.oci.descriptor import MAX_SIZE

RANGE = 16 * 1024 * 1024  # bytes
_MEDIA_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class BlobRange:
    """Range ``number`` of the blob of ``digest`` and ``size``.

    Raises:
        FormatError: the blob has no such range.
    """

    digest: Digest
    size: int
    number: int

    def __post_init__(self) -> None:
        if not 0 < self.size <= MAX_SIZE:
            raise FormatError(f"a blob of {self.size} bytes has no ranges")
        if not 0 <= self.number * RANGE < self.size:
            raise FormatError(f"a blob of {self.size} bytes has no range {self.number}")

    @classmethod
    def at(cls, content: Descriptor, offset: int) -> BlobRange:
        """Return the range of ``content`` with the byte at ``offset``. Raises FormatError."""
        return cls(content.digest, content.size, offset // RANGE)

    @property
    def start(self) -> int:
        return self.number * RANGE

    @property
    def end(self) -> int:
        return min(self.size, self.start + RANGE)

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """True if it is all of its blob."""
        return self.size <= RANGE

    @property
    def content(self) -> Descriptor:
        """The blob."""
        return Descriptor(_MEDIA_TYPE, self.digest, self.size)


def ranked(nodes: Iterable[str], digest: Digest, number: int) -> list[str]:
    """Return the ids of nodes: the owner of a range, its owner without that node, and so on."""
    key = f"\0{digest}\0{number}".encode()
    weighed = [
        (hashlib.blake2b(node.encode() + key, digest_size=8).digest(), node) for node in nodes
    ]
    return [node for _, node in sorted(weighed, reverse=True)]

"""Ranges of a blob, and which nodes are at home to each.

Rendezvous hashing (highest random weight; D. Thaler, C. Ravishankar, "Using name-based mappings
to increase hit rates", IEEE/ACM ToN 6(1), 1998): every node weighs every other by a hash, so all
that know the same nodes name the same home, without a word between them. Where a node goes or
comes, only the ranges that it is at home to move.
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
    """Range ``number`` of the blob of ``digest`` and ``size``. Only those that a blob has exist.

    Raises:
        FormatError: there is no such range.
    """

    digest: Digest
    size: int
    number: int

    def __post_init__(self) -> None:
        if not 0 < self.size <= MAX_SIZE:
            raise FormatError(f"{self.size} is no size of a blob that has ranges")
        if not 0 <= self.number * RANGE < self.size:
            raise FormatError(f"a blob of {self.size} bytes has no range {self.number}")

    @classmethod
    def at(cls, content: Descriptor, offset: int) -> BlobRange:
        """The range of ``content`` that the byte at ``offset`` is in. Raises FormatError."""
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
        """Whether it is all of its blob: then the blob's digest says whether it is right."""
        return self.size <= RANGE

    @property
    def content(self) -> Descriptor:
        """The blob."""
        return Descriptor(_MEDIA_TYPE, self.digest, self.size)


def ranked(nodes: Iterable[str], part: BlobRange) -> list[str]:
    """The ids of nodes, the first at home to ``part``, the second where the first is not there,
    and so on."""
    key = f"\0{part.digest}\0{part.number}".encode()
    weighed = [
        (hashlib.blake2b(node.encode() + key, digest_size=8).digest(), node) for node in nodes
    ]
    return [node for _, node in sorted(weighed, reverse=True)]

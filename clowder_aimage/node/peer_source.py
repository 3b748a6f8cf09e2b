"""A registry behind the nodes around: what one of them has is not asked of the registry again.

A blob is read range by range, each from the node that is at home to it, from one that the home
names, from the second home, and at last from the registry. No byte of a range goes on before all
of it came and was found to be what its giver says; the whole blob is verified by whoever takes
it in, as ever. Documents, and the question what a tag means, are the registry's alone.
"""

from __future__ import annotations

import contextlib
import io
import threading
from contextlib import closing
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from clowder_aimage.content.store import Source, WrappedSource
from clowder_aimage.errors import AImageError
from clowder_aimage.node.evidence import Evidence
from clowder_aimage.node.flight import Flight
from clowder_aimage.node.peer_state import Peers
from clowder_aimage.node.peer_upstream import OnBytes, PeerUpstream
from clowder_aimage.node.piece import LoadedPiece
from clowder_aimage.node.range_owner import Homes
from clowder_aimage.node.range_store import Ranges
from clowder_aimage.node.rendezvous import RANGE, BlobRange
from clowder_aimage.oci import Descriptor, Reference, mediatype

MEMORY = 12  # ranges that are in memory at once, in all pulls together


@dataclass(frozen=True, slots=True)
class Swarm:
    """What all sources of this node share."""

    neighbours: Peers
    homes: Homes
    ranges: Ranges
    upstream: PeerUpstream
    evidence: Evidence
    on_received: OnBytes
    room: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(MEMORY)
    )


class PeerSource(WrappedSource):
    """The registry's repository ``source``, which ``reference`` is in, with the nodes around.

    ``on_bytes`` hears how many bytes came from a "neighbour", and how many had come for one
    before ("cache"); what comes from ``source`` it can count itself.
    """

    def __init__(
        self, swarm: Swarm, source: Source, reference: Reference, on_bytes: OnBytes
    ) -> None:
        super().__init__(source)
        self._swarm = swarm
        self._reference, self._on_bytes = reference, on_bytes

    @property
    def alignment(self) -> int:
        return RANGE

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        swarm = self._swarm
        is_plain = content.media_type in mediatype.DOCUMENTS or not content.size
        is_alone = not swarm.neighbours.are_configured
        if is_plain or is_alone or not swarm.upstream.gives_ranges(self._registry):
            return self._source.open(content, offset, length)
        swarm.neighbours.wait()
        swarm.upstream.knows(content)
        end = content.size if length is None else min(content.size, offset + length)
        return cast(BinaryIO, _Reader(self, content, offset, end))

    def distrust(self, content: Descriptor, /) -> bool:
        """What came for ``content`` was wrong; whether another place may be asked now."""
        self._swarm.ranges.forget(content.digest)
        others = self._swarm.evidence.doubt(content.digest)
        with contextlib.suppress(AImageError):  # the one that neighbours get it from, too
            self._swarm.upstream.distrust(self._reference, BlobRange.at(content, 0))
        own = super().distrust(content)
        return others or own

    def load(self, content: Descriptor, offset: int) -> LoadedPiece:
        """The range that the byte at ``offset`` is in. Raises as the registry does."""
        swarm, part = self._swarm, BlobRange.at(content, offset)
        if swarm.evidence.is_doubted(part.digest):
            flight = Flight(part)  # which nobody else is in: theirs may come from a wrong mirror
            flight.run(lambda part: closing(self._source.open(content, part.start, part.length)))
            swarm.evidence.compare(part, flight.digest)
            return LoadedPiece(flight.data, flight.digest)
        if (kept := swarm.ranges.take(part)) is not None:
            swarm.evidence.note(part, None, kept.digest)
            self._on_bytes("cache", part.length)
            return kept
        if swarm.ranges.is_coming(part):  # for a neighbour: we were at home to it a moment ago
            return self._of_registry(content, part)
        if (found := swarm.homes.ask(self._reference, part)) is not None:
            swarm.evidence.note(part, found.giver, found.digest)
            giver = None if part.is_whole else found.giver.id
            swarm.ranges.know(part, found.digest, giver=giver)
            swarm.on_received("received", part.length)
            self._on_bytes("neighbour", part.length)
            return LoadedPiece(found.data, found.digest)
        return self._of_registry(content, part)

    def _of_registry(self, content: Descriptor, part: BlobRange) -> LoadedPiece:
        is_ours = False

        def opened(part: BlobRange) -> closing[BinaryIO]:
            nonlocal is_ours
            is_ours = True
            reader = self._source.open(content, part.start, part.length)
            if not self._source.supports_ranges(content) and not part.is_whole:
                self._swarm.upstream.ignores_ranges(self._registry)
            return closing(reader)

        loaded = self._swarm.ranges.load(part, opened)
        if not is_ours:  # it was being fetched for a neighbour
            self._on_bytes("cache", part.length)
        return loaded

    @property
    def _registry(self) -> str:
        return self._reference.registry or ""

    @property
    def room(self) -> threading.BoundedSemaphore:
        """Who has a range in memory holds a place in it."""
        return self._swarm.room


class _Reader(io.RawIOBase):
    """Bytes [at, end) of a blob, one range in memory at a time."""

    def __init__(self, source: PeerSource, content: Descriptor, at: int, end: int) -> None:
        self._source, self._content = source, content
        self._at, self._end = at, end
        self._part: BlobRange | None = None
        self._began = 0
        self._loaded: LoadedPiece | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._at >= self._end:
            return 0
        if self._part is None or self._at >= self._part.end:
            self._release()
            self._take()
        assert self._part is not None and self._loaded is not None
        here = self._at - self._part.start
        count = min(len(buffer), self._part.end - self._at, self._end - self._at)
        memoryview(buffer)[:count] = memoryview(self._loaded.data)[here : here + count]
        self._at += count
        return count

    def _take(self) -> None:
        self._source.room.acquire()
        try:
            self._loaded = self._source.load(self._content, self._at)
        except BaseException:
            self._source.room.release()
            raise
        self._part, self._began = BlobRange.at(self._content, self._at), self._at

    def _release(self) -> None:
        """Whoever reads is done with the range: its bytes are where they go to."""
        part, loaded, self._part, self._loaded = self._part, self._loaded, None, None
        if part is not None and loaded is not None:
            loaded.release(self._began == part.start and self._at >= part.end)
            self._source.room.release()

    def close(self) -> None:
        if not self.closed:
            self._release()
        super().close()

"""The exchange of ranges of blobs with other nodes.

A blob is read range by range: from the node that owns the range, from a node to which the owner
redirects, from the next owner, and finally from the registry. The ingest verifies the blob; after
a mismatch it is read from the registry alone. Manifests and tags always come from the registry.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from clowder_aimage.content.store import Reader, Source, WrappedSource
from clowder_aimage.content.verified_reader import RawReader
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.peers import Peers, SharingLimits, parse_peer
from clowder_aimage.node.range_cache import RangeCache, RangeFlight
from clowder_aimage.node.range_routes import RangeRoutes, ReadOnlyRegistry
from clowder_aimage.node.range_source import RANGE, BlobRange, OnBytes, RangeOwners, RangeUpstream
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.peer import BlobSpan, PeerClient, PeerError, PeerTimeouts

_MAX_FAILURES = 3  # failed peers for a range before the registry is used


class PeerSharing:
    """Ranges of blobs from and for the nodes at ``addresses()``; ``node`` is the id of this one.

    ``has_repository(reference)``, called in threads, returns whether this node pulls from a
    repository itself; only then does it fetch for others. ``token`` is shared by the nodes. The
    callbacks may be called from any thread:

    - ``on_bytes(source, count)``: bytes were fetched for others from a "registry" or "mirror";
    - ``on_traffic(direction, count)``: bytes were "sent" to others or "received" from them;
    - ``on_state(url, state, reason)``: a node became "live" or "silent".

    Raises UsageError if an address is invalid.
    """

    def __init__(
        self,
        layout: ImageLayout,
        options: ClientOptions,
        *,
        node: str,
        addresses: Callable[[], Sequence[str]],
        token: str | None,
        has_repository: Callable[[Reference], bool],
        on_bytes: OnBytes,
        on_traffic: OnBytes,
        on_state: Callable[[str, str, str | None], object],
        ca_file: Path | None = None,
        limits: SharingLimits | None = None,
        timeouts: PeerTimeouts | None = None,
    ) -> None:
        for text in addresses():
            parse_peer(text)
        self._closed = threading.Event()
        self._client = PeerClient(node, token, ca_file=ca_file, timeouts=timeouts)
        self._upstream = RangeUpstream(options, on_bytes)
        self.peers = Peers(
            addresses, self._client, node, on_state, limits=limits or SharingLimits()
        )
        owners = RangeOwners(node, self.peers, self._client, self._closed)
        self.cache = RangeCache(layout, self._upstream, owners, on_traffic)
        self.ranges = RangeRoutes(self.cache, has_repository)
        self.registry = ReadOnlyRegistry(layout, node, self.ranges)

    def close(self) -> None:
        """Close the exchange: fail pulls that wait for other nodes, remove ranges kept for them."""
        self._closed.set()
        self._client.close()
        self.peers.close()
        self._upstream.close()
        self.cache.close()
        self.registry.leases.close()

    def near(
        self, reference: Reference, on_bytes: OnBytes = lambda *_: None
    ) -> Callable[[Source], Source]:
        """Return a function that wraps the source of a pull in a ``PeerSource``."""
        return lambda source: PeerSource(self.cache, source, reference, on_bytes)


class PeerSource(WrappedSource):
    """The repository of ``reference`` at the registry ``source``, with the other nodes before it.

    ``on_bytes`` is called with the bytes from a "neighbour" and with those already fetched on
    behalf of one ("cache"); ``source`` counts its own.
    """

    def __init__(
        self, cache: RangeCache, source: Source, reference: Reference, on_bytes: OnBytes
    ) -> None:
        super().__init__(source)
        self.cache, self.owners, self.upstream = cache, cache.owners, cache.upstream
        self.source, self.reference, self._on_bytes = source, reference, on_bytes
        self._lock = threading.Lock()
        self._of_peers: set[Digest] = set()  # blobs partly read from a peer
        self._wrong: set[Digest] = set()  # those of them that failed verification

    @property
    def alignment(self) -> int:
        return RANGE

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        if not self._is_shared(content):
            return self.source.open(content, offset, length)
        self.owners.peers.wait()
        self.upstream.note_size(content)
        end = content.size if length is None else min(content.size, offset + length)
        return _RangeReader(self, content, offset, end)

    def _is_shared(self, content: Descriptor) -> bool:
        return (
            content.media_type not in mediatype.DOCUMENTS
            and content.size > 0
            and content.digest not in self._wrong
            and self.owners.peers.is_configured
            and self.upstream.has_ranges(self.reference.registry or "")
        )

    def invalidate(self, content: Descriptor, /) -> bool:
        """Restrict a blob that failed verification to the registry; return whether to retry."""
        self.cache.forget(content.digest)
        self.upstream.invalidate(self.reference, content)
        with self._lock:
            was_shared = content.digest in self._of_peers
            self._of_peers.discard(content.digest)
            self._wrong.add(content.digest)
        own = super().invalidate(content)
        return was_shared or own

    def count(self, content: Descriptor, source: str, count: int) -> None:
        """Count bytes from a "neighbour", or from the "cache" of ranges kept for them."""
        with self._lock:
            self._of_peers.add(content.digest)
        self._on_bytes(source, count)
        if source == "neighbour":
            self.cache.on_traffic("received", count)


class _RangeReader(RawReader):
    """Read the bytes [at, end) of a blob, one range after another."""

    def __init__(self, source: PeerSource, content: Descriptor, at: int, end: int) -> None:
        self._source, self._content = source, content
        self._at, self._end = at, end
        self._part: BlobRange | None = None
        self._began = self._failures = 0
        self._stream: Reader | None = None
        self._name = ""
        self._came = 0
        self._flight: RangeFlight | None = None

    def _fill(self, view: memoryview) -> int:
        if self._part is not None and self._at >= min(self._part.end, self._end):
            self._finish()
        view = view[: self._end - self._at]
        if not view:
            return 0
        if self._part is None:
            self._part, self._began = BlobRange.at(self._content, self._at), self._at
            self._failures = 0
        while True:
            try:
                if self._stream is None:
                    self._stream, self._name = self._opened(self._part)
                count = self._stream.readinto(view[: self._part.end - self._at])
                if count or self._name == "registry":
                    break
            except PeerError:
                self._failures += 1
            self._close_stream()
        self._at, self._came = self._at + count, self._came + count
        if self._flight is not None:
            self._flight.moved = time.monotonic()
        return count

    def _opened(self, part: BlobRange) -> tuple[Reader, str]:
        """Open the rest of a range at the first source that has it; return its name too."""
        source, cache = self._source, self._source.cache
        span = BlobSpan(source.reference, part.digest, self._at, min(part.end, self._end))
        while True:
            if (kept := cache.kept_file(part)) is not None:
                kept.offset += self._at - part.start
                return kept, "cache"
            may_ask = self._failures < _MAX_FAILURES and self._flight is None
            may_ask = may_ask and not cache.is_coming(part)
            if may_ask and (stream := source.owners.open(span)) is not None:
                return stream, "neighbour"
            if self._flight is None:
                flight, is_new = cache.board(part)
                if not is_new:
                    cache.join(flight)
                    continue
                self._flight = flight
                if (stream := source.owners.open_stored(span)) is not None:
                    return stream, "neighbour"
            self._flight.is_of_registry = True
            reader = source.source.open(self._content, self._at, span.end - self._at)
            if not source.source.supports_ranges(self._content) and not part.is_whole:
                source.upstream.ignores_ranges(source.reference.registry or "")
            return reader, "registry"

    def _finish(self) -> None:
        """Finish a range whose bytes have all been written."""
        part, flight = self._part, self._flight
        self._close_stream()
        if part is not None and self._began == part.start and self._at >= part.end:
            self._source.cache.wrote(part)
        if flight is not None:
            self._source.cache.land(flight)
        self._part = self._flight = None

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._came and self._name != "registry":
            self._source.count(self._content, self._name, self._came)
        self._stream, self._came = None, 0

    def close(self) -> None:
        if not self.closed:
            self._finish()
        super().close()

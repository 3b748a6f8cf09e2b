"""The exchange of ranges of blobs with other nodes.

A blob is read range by range: from the node that owns the range, from the target of the owner's
redirect, from the next owner, and finally from the registry. The ingest verifies the blob; after
a mismatch it is read from the registry alone. Manifests and tags always come from the registry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from clowder_aimage.content.store import Reader, Source, WrappedSource
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.peers import Peers, SharingLimits, parse_peer
from clowder_aimage.node.range_cache import RangeCache
from clowder_aimage.node.range_reader import RangeExchange, RangeReader
from clowder_aimage.node.range_routes import RangeRoutes, ReadOnlyRegistry
from clowder_aimage.node.range_source import RANGE, OnBytes, RangeOwners, RangeUpstream
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.peer import PeerClient, PeerRange, PeerTimeouts


class PeerSharing:
    """Ranges of blobs from and for the nodes at ``addresses()``; ``node`` is the id of this one.

    ``has_repository(reference)``, called in threads, returns True if this node pulls from a
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
        self.cache = RangeCache(layout, self.peers.limits)
        self._exchange = RangeExchange(self.cache, self._upstream, owners, on_traffic)
        self.ranges = RangeRoutes(self._exchange, has_repository)
        self.registry = ReadOnlyRegistry(layout, node, self.ranges)

    def close(self) -> None:
        """Close the exchange: fail pulls that wait for other nodes, remove ranges kept for them."""
        self._closed.set()
        self._client.close()
        self.peers.close()
        self._upstream.close()
        self.cache.close()
        self.registry.leases.close()

    def build_source_wrapper(
        self, reference: Reference, on_bytes: OnBytes = lambda *_: None
    ) -> Callable[[Source], Source]:
        """Return a function that wraps the source of a pull in a ``PeerSource``."""
        return lambda source: PeerSource(self._exchange, source, reference, on_bytes)


class PeerSource(WrappedSource):
    """The repository of ``reference`` at the registry ``source``, with the other nodes before it.

    ``on_bytes`` is called with the bytes from a "neighbour" and with those already fetched on
    behalf of one ("cache"); ``source`` counts its own.
    """

    def __init__(
        self, exchange: RangeExchange, source: Source, reference: Reference, on_bytes: OnBytes
    ) -> None:
        super().__init__(source)
        self._exchange, self._reference, self._on_bytes = exchange, reference, on_bytes
        self._lock = threading.Lock()
        # Blobs partly read from a peer.
        self._of_peers: set[Digest] = set()
        # Those of them that failed verification.
        self._wrong: set[Digest] = set()

    @property
    def alignment(self) -> int:
        return RANGE

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        if not self._is_shared(content):
            return self._source.open(content, offset, length)
        self._exchange.owners.peers.wait()
        end = content.size if length is None else min(content.size, offset + length)
        peer_range = PeerRange(self._reference, content, offset, end)
        return RangeReader(
            self._exchange, self._source, peer_range, partial(self._count, content.digest)
        )

    def _is_shared(self, content: Descriptor) -> bool:
        return (
            content.media_type not in mediatype.DOCUMENTS
            and content.size > 0
            and content.digest not in self._wrong
            and self._exchange.owners.peers.is_configured
            and self._exchange.upstream.has_ranges(self._reference.registry or "")
        )

    def invalidate(self, content: Descriptor, /) -> bool:
        """Restrict a blob that failed verification to the registry; return True to retry."""
        self._exchange.cache.forget(content.digest)
        self._exchange.upstream.invalidate(self._reference, content)
        with self._lock:
            was_shared = content.digest in self._of_peers
            self._of_peers.discard(content.digest)
            self._wrong.add(content.digest)
        can_retry = super().invalidate(content)
        return was_shared or can_retry

    def _count(self, digest: Digest, name: str, count: int) -> None:
        if name == "registry":
            return
        with self._lock:
            self._of_peers.add(digest)
        self._on_bytes(name, count)
        if name == "neighbour":
            self._exchange.on_traffic("received", count)

"""The exchange of ranges with other nodes, as the rest of the node sees it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clowder_aimage.content.store import Source
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.peer_source import PeerSource
from clowder_aimage.node.peers import ConfiguredPeer, PeerIntervals, Peers
from clowder_aimage.node.range_cache import LIMIT, SPARED, RangeCache
from clowder_aimage.node.range_owner import OwnerTimeouts, RangeOwners
from clowder_aimage.node.range_routes import UPLOADS, RangeRoutes
from clowder_aimage.node.range_upstream import OnBytes, RangeUpstream
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.peer import PeerClient, PeerTimeouts


def _nothing(*_: object) -> None:
    pass


class PeerSharing:
    """Ranges of blobs from and for the nodes at ``addresses``.

    ``has_repository(reference)``, called in threads, is True if this node fetches from a
    repository itself: then it does so for others. ``token`` is shared by the nodes. Called from
    any thread:

    - ``on_bytes(source, count)``: bytes came for others, from a "registry" or "mirror";
    - ``on_traffic(direction, count)``: bytes were "sent" to others, or "received" from them;
    - ``on_state(url, state, reason)``: a node is "live" or "silent" now.

    Raises:
        UsageError: one of the addresses is not valid.
    """

    def __init__(
        self,
        layout: ImageLayout,
        options: ClientOptions,
        *,
        addresses: Sequence[str] | Callable[[], Sequence[str]],
        token: str | None,
        has_repository: Callable[[Reference], bool],
        node: str | None = None,
        ca_file: Path | None = None,
        on_bytes: OnBytes = _nothing,
        on_traffic: OnBytes = _nothing,
        on_state: Callable[[str, str, str | None], object] = _nothing,
        limit: int = LIMIT,
        spared: int = SPARED,
        uploads: int = UPLOADS,
        intervals: PeerIntervals | None = None,
        timeouts: PeerTimeouts | None = None,
        owner_timeouts: OwnerTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        listed = addresses if callable(addresses) else tuple(addresses)
        configured = listed if callable(listed) else lambda: listed
        for text in configured():
            ConfiguredPeer.parse(text)
        self.node = node or secrets.token_hex(16)
        self._closed = threading.Event()
        self._client = PeerClient(self.node, token, ca_file=ca_file, timeouts=timeouts)
        self._upstream = RangeUpstream(options, on_bytes, clock=clock)
        self._peers = Peers(
            configured, self._client, self.node,
            intervals=intervals, on_state=on_state, clock=clock,
        )  # fmt: skip
        owners = RangeOwners(
            self.node, self._peers, self._client, self._closed,
            timeouts=owner_timeouts, clock=clock,
        )  # fmt: skip
        self._cache = RangeCache(
            layout, self._upstream, owners, on_traffic, limit=limit, spared=spared
        )
        self.ranges = RangeRoutes(
            self._cache, has_repository, self._peers, on_traffic, uploads=uploads
        )

    def start(self) -> None:
        """Start to ping the other nodes."""
        self._peers.start()

    def close(self) -> None:
        """Stop: pulls that wait for another node fail, and what was kept for others goes."""
        self._closed.set()
        self._client.close()
        self._peers.close()
        self._upstream.close()
        self._cache.close()

    def near(
        self, reference: Reference, on_bytes: OnBytes = _nothing
    ) -> Callable[[Source], Source]:
        """Return the wrapper of a pull's source that puts the other nodes before its registry.

        ``on_bytes`` is called with the bytes that came for that pull from a "neighbour", and with
        those that had been fetched for one before ("cache").
        """

        def wrap(source: Source) -> Source:
            return PeerSource(self._cache, source, reference, on_bytes)

        return wrap

    def states(self) -> list[dict[str, Any]]:
        """Return ``url``, ``id``, ``state`` and ``reason`` of each other node."""
        return self._peers.states()

    @property
    def kept(self) -> int:
        """The bytes on disk that are kept for other nodes."""
        return self._cache.kept

    def clear(self) -> None:
        """Remove what is kept for other nodes: the disk is needed for something better."""
        self._cache.clear()

"""This node and its neighbours, as the rest of the node sees them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clowder_aimage.content.store import Source
from clowder_aimage.http.route import Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.address import Address
from clowder_aimage.node.evidence import Evidence
from clowder_aimage.node.peer_routes import UPLOADS, PeerRoutes
from clowder_aimage.node.peer_source import PeerSource, Swarm
from clowder_aimage.node.peer_state import BANNED, Pace, Peers
from clowder_aimage.node.peer_upstream import OnBytes, PeerUpstream
from clowder_aimage.node.range_file import LIMIT, SPARED, RangeFile
from clowder_aimage.node.range_owner import Homes, Patience
from clowder_aimage.node.range_store import Ranges
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.peer import PeerClient, Times


def _nothing(*_: object) -> None:
    pass


class PeerSharing:
    """Ranges of blobs from and for the nodes at ``addresses``.

    ``takes_part(reference)``, called in threads, says whether we ask a registry, with our own
    credentials, for what neighbours want of a repository. ``token`` is what the nodes know each
    other by. Called back, from any thread:

    - ``on_bytes(source, count)``: bytes came for neighbours, from a "registry" or "mirror";
    - ``on_traffic(direction, count)``: bytes were "sent" to neighbours, or "received" from them;
    - ``on_state(url, state, reason)``: a neighbour is "live", "silent" or "banned" now.
    - ``on_ban(url, reason)``: it was banned.

    Raises:
        UsageError: one of the addresses is none.
    """

    def __init__(
        self,
        layout: ImageLayout,
        connection: ClientOptions,
        *,
        addresses: Sequence[str] | Callable[[], Sequence[str]],
        token: str | None,
        takes_part: Callable[[Reference], bool],
        node: str | None = None,
        ca_file: Path | None = None,
        on_bytes: OnBytes = _nothing,
        on_traffic: OnBytes = _nothing,
        on_state: Callable[[str, str, str | None], object] = _nothing,
        on_ban: Callable[[str, str], object] = _nothing,
        limit: int = LIMIT,
        spared: int = SPARED,
        uploads: int = UPLOADS,
        pace: Pace | None = None,
        times: Times | None = None,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        listed = addresses if callable(addresses) else tuple(addresses)
        asked = listed if callable(listed) else lambda: listed
        for text in asked():
            Address.parse(text)
        self.node = node or secrets.token_hex(16)
        self._layout = layout
        self._client = PeerClient(self.node, token, ca_file=ca_file, times=times)
        self._upstream = PeerUpstream(connection, on_bytes, clock=clock)
        self._kept = RangeFile(layout, self.node, limit=limit, spared=spared)
        self._ranges = Ranges(layout, self._kept, self._upstream)

        def told(url: str, state: str, reason: str | None) -> None:
            if state == BANNED:
                on_ban(url, reason or "")
            on_state(url, state, reason)

        neighbours = Peers(
            asked, self._client, self.node,
            pace=pace, on_state=told, each_time=self._look, clock=clock,
        )  # fmt: skip
        self._neighbours = neighbours
        self._evidence = Evidence(neighbours.ban)
        homes = Homes(
            self.node, neighbours, self._client, self._ranges.closed,
            patience=patience, clock=clock,
        )  # fmt: skip
        self._swarm = Swarm(
            neighbours, homes, self._ranges, self._upstream, self._evidence, on_traffic
        )
        self._share = PeerRoutes(
            self.node, self._ranges, takes_part, neighbours, homes, on_traffic, uploads=uploads
        )

    def start(self) -> None:
        """Begin to ask who lives, and to keep ranges. Blocks for a moment."""
        self._kept.start()
        self._neighbours.start()

    def close(self) -> None:
        """End: pulls that wait for a neighbour fail, what was kept for others goes. Blocks for a
        moment; the routes are no more to be asked."""
        self._ranges.close()
        self._client.close()
        self._neighbours.close()
        self._upstream.close()
        self._kept.close()

    def near(
        self, reference: Reference, on_bytes: OnBytes = _nothing
    ) -> Callable[[Source], Source]:
        """What puts the neighbours between a pull of ``reference`` and its registry.

        ``on_bytes`` hears how many bytes came for that pull from a "neighbour", and from what had
        been fetched for one before ("cache").
        """

        def wrap(source: Source) -> Source:
            return PeerSource(self._swarm, source, reference, on_bytes)

        return wrap

    def routes(self) -> list[Route]:
        """What neighbours ask; to be added to the worker's routes."""
        return self._share.routes()

    def states(self) -> list[dict[str, Any]]:
        """The neighbours: ``url``, ``id``, ``state`` and ``reason`` of each."""
        return self._neighbours.states()

    @property
    def kept(self) -> int:
        """The bytes on disk of ranges that are kept for neighbours."""
        return self._kept.size

    def clear(self) -> None:
        """Let go of what is kept for neighbours: the disk is wanted for something better."""
        self._kept.clear()

    def _look(self) -> None:
        """Now and then: what has come is not kept twice, and who is to blame is known."""
        self._kept.tidy()
        self._evidence.settle(self._layout.exists)

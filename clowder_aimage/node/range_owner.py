"""Ranges from the nodes that own them, or that have them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

from clowder_aimage.errors import NetworkError
from clowder_aimage.node.peers import LATE, Peer, Peers
from clowder_aimage.node.rendezvous import RANGE, ranked
from clowder_aimage.registry.peer import (
    BlobSpan,
    PeerClient,
    PeerError,
    PeerReader,
    PeerRefusal,
)

OWNERS = 4  # nodes that are asked for a range, one after the other if they fail
OTHERS = 8  # nodes that are asked if they have it, before the registry is
MAX_HOPS = 12  # nodes that a range is redirected to, one after the other
_MAX_MISSES = 6  # redirects in a row to nodes that do not have the range


@dataclass(frozen=True, slots=True)
class OwnerTimeouts:
    """Timeouts in seconds.

    ``coming``: for an owner that receives a range, or redirects; ``busy``: for one that sends to
    others; ``pause``: the longest pause between two requests.
    """

    coming: float = 120.0
    busy: float = 20.0
    pause: float = 1.0


class RangeOwners:
    """The other nodes as owners of ranges. Threads may share it.

    ``closed`` is set when this node, whose id is ``node``, shuts down.
    """

    def __init__(
        self,
        node: str,
        peers: Peers,
        client: PeerClient,
        closed: Event,
        *,
        timeouts: OwnerTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self.peers, self._client = node, peers, client
        self._closed, self._clock = closed, clock
        self._timeouts = timeouts or OwnerTimeouts()

    def open(self, span: BlobSpan) -> PeerReader | None:
        """Open a span of a range at its owner, or at a node to which that redirects.

        Returns:
            None if this node owns the range, or its owner does not send it.

        Raises:
            NetworkError: this node shuts down.
        """
        usable = self.peers.usable()
        order = ranked([*usable, self._node], span.digest, span.start // RANGE)
        for node in order[:OWNERS]:
            if node == self._node:
                return None
            found = self._of_owner(usable[node], span)
            if found is not None:
                return found if isinstance(found, PeerReader) else None
        return None

    def open_stored(self, span: BlobSpan, first: Sequence[str] = ()) -> PeerReader | None:
        """Open a span at a node that has it, without making any node fetch it.

        Asked are ``first``, and the nodes that would own the range without this one.
        """
        usable = self.peers.usable()
        order = ranked(usable, span.digest, span.start // RANGE)[:OTHERS]
        for node in dict.fromkeys([*first, *order]):
            if node in usable and self._has(usable[node], span):
                found = self._of_owner(usable[node], span, is_stored=True)
                if isinstance(found, PeerReader):
                    return found
        return None

    def _of_owner(
        self, owner: Peer, span: BlobSpan, *, is_stored: bool = False
    ) -> PeerReader | bool | None:
        """Open a span at an owner, as soon as that can send it.

        Returns:
            False if it does not send it, None if it fails: then the next node is the owner.
        """
        began, pause, misses = self._clock(), 0.05, 0
        while self.peers.is_usable(owner):
            found = self._open(owner, span, is_stored=is_stored)
            if not isinstance(found, PeerRefusal):
                return found
            if not found.is_busy:
                return False
            stream = self._of_holders(owner, span, found.nodes)
            if stream is not None:
                return stream
            misses = misses + 1 if found.status == 307 else 0
            waited = self._clock() - began
            is_coming = found.is_coming or found.status == 307
            if waited > (self._timeouts.coming if is_coming else self._timeouts.busy):
                if is_coming:
                    self.peers.failed(owner, "always busy", cost=LATE)
                return False
            if misses > _MAX_MISSES and waited > self._timeouts.pause:
                return False
            if self._closed.wait(random.uniform(0.5, 1.0) * pause):  # noqa: S311 - no two in step
                raise NetworkError("this node is shutting down", hint="try again")
            pause = min(2 * pause, self._timeouts.pause)
        return None

    def _of_holders(self, owner: Peer, span: BlobSpan, nodes: Sequence[str]) -> PeerReader | None:
        """Open a span at one of the nodes to which a busy one redirects, or those redirect.

        Only nodes that are known here are asked, at the addresses that are configured here.
        """
        usable = self.peers.usable()
        asked, named = {self._node, owner.id}, random.sample(nodes, len(nodes))
        while named and len(asked) < MAX_HOPS + 2:
            node = named.pop()
            if node in asked or node not in usable:
                continue
            asked.add(node)
            found = self._open(usable[node], span, is_stored=True)
            if isinstance(found, PeerReader):
                return found
            if isinstance(found, PeerRefusal):
                named += found.nodes
        return None

    def _open(
        self, one: Peer, span: BlobSpan, *, is_stored: bool = False
    ) -> PeerReader | PeerRefusal | None:
        """Send one request. A node that fails is left out for a while."""
        try:
            found = self._client.open(one.address, span, is_stored=is_stored)
        except PeerError as error:
            self._ended(one, error)
            return None
        if isinstance(found, PeerReader):
            found.on_end = lambda error: self._ended(one, error)
        return found

    def _has(self, one: Peer, span: BlobSpan) -> bool:
        try:
            return self._client.has(one.address, span)
        except PeerError as error:
            if not error.is_late:
                self._ended(one, error)
            return False

    def _ended(self, one: Peer, error: PeerError | None) -> None:
        """Note that all of a span came from a node, or that it failed."""
        if error is None:
            self.peers.succeeded(one)
        elif not self._closed.is_set():
            self.peers.failed(one, error.message, cost=LATE if error.is_late else 1)

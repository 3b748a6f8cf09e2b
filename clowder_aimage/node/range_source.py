"""Ranges of a blob and their sources: nodes that own or have them, and registries.

The owner of a range is computed by rendezvous hashing (D. Thaler, C. Ravishankar, "Using
name-based mappings to increase hit rates", IEEE/ACM ToN 6(1), 1998). Nodes with the same peers
compute the same owner without communication. When a node joins or leaves, only its ranges move.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event

from clowder_aimage.content.copy_option import Rate
from clowder_aimage.distribution.upstream import ClientPool
from clowder_aimage.errors import AImageError, FormatError, NetworkError
from clowder_aimage.node.peers import LATE, Peer, Peers
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.peer import PeerClient, PeerError, PeerRange, PeerReader, PeerRefusal

RANGE = 16 * 1024 * 1024  # bytes
# Owners tried for a range, in order.
OWNERS = 4
# Nodes tried for a stored range before the registry.
OTHERS = 8
# Redirects followed for a range.
MAX_HOPS = 12
# Requests on one connection before it is reopened: credentials may have changed.
MAX_USES = 4096
# Consecutive redirects to nodes without the range.
_MAX_MISSES = 6
# Seconds before a registry that ignored a range is sent range requests again.
_PAUSE = 600.0

OnBytes = Callable[[str, int], object]


@dataclass(frozen=True, slots=True)
class BlobRange:
    """The range ``number`` of the blob with ``digest`` and ``size``. Raises FormatError."""

    digest: Digest
    size: int
    number: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.size:
            raise FormatError(f"a blob of {self.size} bytes has no range {self.number}")

    @classmethod
    def at(cls, content: Descriptor, offset: int) -> BlobRange:
        """Return the range of ``content`` that contains ``offset``. Raises FormatError."""
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
        """Return True if the range is the complete blob."""
        return self.size <= RANGE

    @property
    def content(self) -> Descriptor:
        """The descriptor of the blob."""
        return Descriptor("application/octet-stream", self.digest, self.size)


def rank_nodes(nodes: Iterable[str], digest: Digest, number: int) -> list[str]:
    """Return ids of nodes by rank: the owner of a range, then its owner without that node, etc."""
    key = f"\0{digest}\0{number}".encode()
    weighted = [
        (hashlib.blake2b(node.encode() + key, digest_size=8).digest(), node) for node in nodes
    ]
    return [node for _, node in sorted(weighted, reverse=True)]


class RangeOwners:
    """The other nodes as owners of ranges. Thread-safe.

    ``closed`` is set when this node, whose id is ``node``, shuts down.
    """

    def __init__(self, node: str, peers: Peers, client: PeerClient, closed: Event) -> None:
        self.peers, self._node, self._client, self._closed = peers, node, client, closed

    def open(self, peer_range: PeerRange) -> PeerReader | None:
        """Open requested bytes at its owner, or at the target of the owner's redirect.

        Returns None if this node is the owner or no owner sends it. Raises NetworkError if closed.
        """
        usable = self.peers.select_usable()
        order = rank_nodes(
            [*usable, self._node], peer_range.content.digest, peer_range.start // RANGE
        )
        for node in order[:OWNERS]:
            if node == self._node:
                return None
            opened = self._open_at_owner(usable[node], peer_range)
            if opened is not None:
                return opened if isinstance(opened, PeerReader) else None
        return None

    def open_stored(
        self, peer_range: PeerRange, preferred: Sequence[str] = ()
    ) -> PeerReader | None:
        """Open requested bytes at a node that has it already, without a fetch on any node.

        Tries ``preferred``, then the nodes that would own the range if this one did not exist.
        """
        usable = self.peers.select_usable()
        order = rank_nodes(usable, peer_range.content.digest, peer_range.start // RANGE)[:OTHERS]
        for node in dict.fromkeys([*preferred, *order]):
            if node in usable and self._has(usable[node], peer_range):
                opened = self._open_at_owner(usable[node], peer_range, is_stored=True)
                if isinstance(opened, PeerReader):
                    return opened
        return None

    def _open_at_owner(
        self, owner: Peer, peer_range: PeerRange, *, is_stored: bool = False
    ) -> PeerReader | bool | None:
        """Open requested bytes at an owner as soon as the owner can send it.

        Returns False if the owner does not send it; None if it failed: the next node is the owner.
        """
        limits = self.peers.limits
        began, pause, misses = time.monotonic(), 0.05, 0
        while owner in self.peers.select_usable().values():
            response = self._open(owner, peer_range, is_stored=is_stored)
            if not isinstance(response, PeerRefusal):
                return response
            if not response.is_busy:
                return False
            stream = self._open_at_holder(owner, peer_range, response.nodes)
            if stream is not None:
                return stream
            misses = misses + 1 if response.status == 307 else 0
            waited = time.monotonic() - began
            is_coming = response.is_coming or response.status == 307
            if waited > (limits.coming if is_coming else limits.busy):
                if is_coming:
                    self.peers.record_failure(owner, "busy for too long", cost=LATE)
                return False
            if misses > _MAX_MISSES and waited > limits.pause:
                return False
            if self._closed.wait(random.uniform(0.5, 1.0) * pause):  # noqa: S311 - jitter
                raise NetworkError("this node is shutting down", hint="try again")
            pause = min(2 * pause, limits.pause)
        return None

    def _open_at_holder(
        self, owner: Peer, peer_range: PeerRange, nodes: Sequence[str]
    ) -> PeerReader | None:
        """Open requested bytes at a node that has it, following the redirects of a busy owner.

        Only configured nodes are contacted, at their configured addresses.
        """
        usable = self.peers.select_usable()
        tried, candidates = {self._node, owner.id}, random.sample(nodes, len(nodes))
        # Two nodes count as tried from the beginning: this one and the owner.
        while candidates and len(tried) < MAX_HOPS + 2:
            node = candidates.pop()
            if node in tried or node not in usable:
                continue
            tried.add(node)
            response = self._open(usable[node], peer_range, is_stored=True)
            if isinstance(response, PeerReader):
                return response
            if isinstance(response, PeerRefusal):
                candidates += response.nodes
        return None

    def _open(
        self, peer: Peer, peer_range: PeerRange, *, is_stored: bool
    ) -> PeerReader | PeerRefusal | None:
        """Send one request. A node that fails is skipped temporarily."""
        try:
            response = self._client.open(peer.url, peer_range, is_stored=is_stored)
        except PeerError as error:
            self._record_end(peer, error)
            return None
        if isinstance(response, PeerReader):
            response.on_end = lambda error: self._record_end(peer, error)
        return response

    def _has(self, peer: Peer, peer_range: PeerRange) -> bool:
        try:
            return self._client.has(peer.url, peer_range)
        except PeerError as error:
            if not error.is_late:
                self._record_end(peer, error)
            return False

    def _record_end(self, peer: Peer, error: PeerError | None) -> None:
        if error is None:
            self.peers.record_success(peer)
        elif not self._closed.is_set():
            self.peers.record_failure(peer, error.message, cost=LATE if error.is_late else 1)


class RangeUpstream:
    """The registries, accessed with this node's credentials. Thread-safe.

    ``on_bytes`` is called with the bytes received from a "registry" or a "mirror" of it.
    """

    def __init__(self, options: ClientOptions, on_bytes: OnBytes) -> None:
        self._options, self._on_bytes = options, on_bytes
        self._lock = threading.Lock()
        self._pool = ClientPool(options, uses=MAX_USES)
        self._rates: dict[str, Rate] = {}
        # Registries that ignore ranges, with expiry.
        self._whole_only: dict[str, float] = {}

    def close(self) -> None:
        """Close all connections; requests in progress fail."""
        self._pool.close()

    def connect(self, reference: Reference) -> AbstractContextManager[Repository]:
        """Return a context with the repository of ``reference``."""
        return self._pool.connect(reference)

    def count(self, repository: Repository, content: Descriptor, count: int) -> None:
        """Count bytes of a blob that were received from a repository for other nodes."""
        is_mirrored = repository.was_mirrored(content)
        self._on_bytes("mirror" if is_mirrored else "registry", count)

    def has_ranges(self, registry: str) -> bool:
        """Return True if range requests may be sent to a registry."""
        return self._whole_only.get(registry, 0.0) <= time.monotonic()

    def record_ignored_ranges(self, registry: str) -> None:
        """Record that a registry ignores range requests."""
        self._whole_only[registry] = time.monotonic() + _PAUSE

    def invalidate(self, reference: Reference, content: Descriptor) -> None:
        """Record a mismatch of a blob's content; later requests may use another source."""
        with contextlib.suppress(AImageError), self._pool.connect(reference) as repository:
            repository.invalidate(content)

    def find_rate(self, registry: str) -> Rate | None:
        """Return the configured rate limit for a registry."""
        limit = self._options.limit(registry)
        with self._lock:
            return self._rates.setdefault(registry, Rate(limit)) if limit else None

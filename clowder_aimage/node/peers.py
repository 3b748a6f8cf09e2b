"""The other nodes: their addresses and their liveness.

One thread pings each node. A node that fails is skipped for twice as long each time.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.errors import UsageError
from clowder_aimage.registry.peer import PeerClient, PeerError, resolve_addresses

LIVE, SILENT = "live", "silent"
# Failures that a late response counts for: a minute.
LATE = 6
_ADDRESS = re.compile(r"(?:(https?)://|(dns):)?\[?([A-Za-z0-9._:%-]{1,253})\]?:([0-9]{1,5})/?")
_MAX_ADDRESSES = 4096  # per name
_THREADS = 8
# Pings per second: with a thousand peers, each is pinged less often.
_RATE = 10.0
# Seconds between two checks for due pings.
_TICK = 0.5
# Seconds that a pull waits for the first pings.
_FIRST_TIMEOUT = 2.0

_log = logging.getLogger("aimage.node")


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """The limits of the exchange of ranges, in seconds and bytes.

    ``ping`` is the interval of pings, ``lookup`` that of look-ups, ``longest`` the maximum time
    for which a failing node is skipped. ``coming`` is the longest wait for an owner that fetches
    the range or redirects, ``busy`` for one that sends to others, ``pause`` the longest pause
    between two requests. ``kept`` bounds the temporary files; ``spared`` bytes of the disk are left
    to pulls. ``uploads`` is the number of concurrent uploads; it is small so that each is quick and
    its receiver can serve others.
    """

    ping: float = 3.0
    lookup: float = 30.0
    longest: float = 600.0
    coming: float = 120.0
    busy: float = 20.0
    pause: float = 1.0
    kept: int = 2 * 1024**3
    spared: int = 1024**3
    uploads: int = 3


def parse_peer(text: str) -> Endpoint:
    """Parse ``HOST:PORT``, ``http://...``, ``https://...`` or ``dns:NAME:PORT``.

    Raises UsageError.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 0 < int(match[4]) < 65536:
        raise UsageError(
            f"invalid neighbour address {text!r}",
            hint="use HOST:PORT, https://HOST:PORT, or dns:NAME:PORT for all addresses of a name",
        )
    return Endpoint(match[1] or match[2] or "http", match[3], int(match[4]))


def resolve_urls(peer: Endpoint) -> list[str]:
    """Return the URLs to ping for a configured address, without link-local addresses of a name.

    Nodes are never reachable at link-local addresses, but a cloud's metadata service with the
    machine's credentials is (169.254.169.254). Raises OSError or UnicodeError if the look-up fails.
    """
    if peer.scheme != "dns":
        return [str(peer)]
    hosts = resolve_addresses(peer.host, peer.port)[:_MAX_ADDRESSES]
    return [str(Endpoint("http", host, peer.port)) for host in hosts if _is_routable(host)]


def _is_routable(host: str) -> bool:
    parsed = ipaddress.ip_address(host)
    address = getattr(parsed, "ipv4_mapped", None) or parsed
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)


@dataclass(eq=False)
class Peer:
    """The state of a node. All fields are guarded by the lock of ``Peers``."""

    url: str
    id: str | None = None
    is_alive: bool = False
    reason: str | None = "not contacted yet"
    # Time of the next ping.
    due: float = 0.0
    # Since the last range received.
    failures: int = 0
    # The node is skipped until then.
    retry_at: float = 0.0
    reported: str = SILENT

    def compute_state(self, timestamp: float) -> tuple[str, str | None]:
        """Return LIVE or SILENT, and the reason why the node is skipped."""
        if not self.is_alive:
            return SILENT, self.reason
        return LIVE, self.reason if self.retry_at > timestamp else None


class Peers:
    """The nodes at ``addresses()``; it is called for each look-up. Thread-safe.

    ``node`` is the id of this node; an address that answers with it is ignored.
    ``on_state(url, state, reason)`` is called when a node becomes live or silent.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        client: PeerClient,
        node: str,
        on_state: Callable[[str, str, str | None], object],
        *,
        limits: SharingLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses, self._client, self._node = addresses, client, node
        self.limits, self._on_state, self._clock = limits, on_state, clock
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._looked_up: dict[Endpoint, list[str]] = {}
        self._next_lookup = 0.0
        self._wake, self._began, self._closed = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="aimage-peers", daemon=True)

    def start(self) -> None:
        """Start the pings."""
        self._thread.start()

    def close(self) -> None:
        """Stop the pings."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self.limits.ping)

    @property
    def is_configured(self) -> bool:
        """Return True if any peers may be configured."""
        return bool(self._addresses())

    def wait(self) -> None:
        """Wait, for a limited time, until all nodes have been pinged once."""
        if self._thread.is_alive():
            self._began.wait(_FIRST_TIMEOUT)

    def select_usable(self) -> dict[str, Peer]:
        """Return the nodes that may be queried now, by id."""
        timestamp = self._clock()
        with self._lock:
            peers = [
                peer
                for peer in self._peers.values()
                if peer.is_alive and peer.retry_at <= timestamp
            ]
        return {peer.id: peer for peer in peers if peer.id and peer.id != self._node}

    def list_states(self) -> list[dict[str, Any]]:
        """Return ``url``, ``id``, ``state`` and ``reason`` of each other node."""
        timestamp = self._clock()
        with self._lock:
            peers = [self._peers[url] for url in sorted(self._peers)]
            states = [
                _to_json(peer.url, peer.id, *peer.compute_state(timestamp))
                for peer in peers
                if peer.id != self._node
            ]
            unresolved = [name for name, urls in self._looked_up.items() if not urls]
        reason = "cannot resolve the name"
        return states + [
            _to_json(f"dns:{name.authority}", None, SILENT, reason) for name in unresolved
        ]

    def record_success(self, peer: Peer) -> None:
        """Record that a range was received from a node."""
        with self._lock:
            peer.failures, peer.retry_at = 0, 0.0

    def record_failure(self, peer: Peer, reason: str, *, cost: int = 1) -> None:
        """Skip a node temporarily, twice as long each time, and ping it at once."""
        with self._lock:
            if peer.retry_at > self._clock():
                # The same failure on another connection.
                return
            peer.failures += cost
            # The exponent is bounded: a float would overflow.
            pause = min(self.limits.longest, 2.0 ** min(peer.failures, 20))
            peer.retry_at = self._clock() + pause
            peer.reason, peer.due = reason, 0.0
        self._wake.set()

    def _run(self) -> None:
        with ThreadPoolExecutor(_THREADS, "aimage-peer") as pool:
            while not self._closed.is_set():
                try:
                    self._look_up()
                    list(pool.map(self._ping, self._take_due()))
                except Exception as error:
                    # The thread must not end.
                    _log.error("cannot ping the neighbours", extra={"reason": str(error)})
                self._began.set()
                self._wake.wait(min(_TICK, self.limits.ping))
                self._wake.clear()

    def _look_up(self) -> None:
        """Update the addresses; keep the last ones of a name that cannot be looked up."""
        configured = list(map(parse_peer, self._addresses()))
        is_due = self._clock() >= self._next_lookup
        if is_due:
            self._next_lookup = self._clock() + self.limits.lookup
        for address in configured:
            if is_due or address not in self._looked_up:
                try:
                    self._looked_up[address] = resolve_urls(address)
                except (OSError, UnicodeError):
                    self._looked_up.setdefault(address, [])
        urls = {url for address in configured for url in self._looked_up[address]}
        with self._lock:
            self._peers = {url: self._peers.get(url) or Peer(url) for url in urls}

    def _take_due(self) -> list[Peer]:
        timestamp = self._clock()
        with self._lock:
            interval = max(self.limits.ping, len(self._peers) / _RATE)
            due = [peer for peer in self._peers.values() if peer.due <= timestamp]
            for peer in due:
                peer.due = timestamp + interval * random.uniform(0.8, 1.2)  # noqa: S311 - desynchronize nodes
        return due

    def _ping(self, peer: Peer) -> None:
        if self._closed.is_set():
            return
        try:
            node, reason = self._client.ping(peer.url), ""
        except PeerError as error:
            node, reason = "", error.message
        with self._lock:
            peer.is_alive = bool(node)
            if not node:
                peer.reason = reason
            elif peer.id != node:
                peer.id, peer.failures, peer.retry_at = node, 0, 0.0
            state, reason_skipped = peer.compute_state(self._clock())
            has_changed = state != peer.reported and peer.id != self._node
            peer.reported = state
        if has_changed:
            self._on_state(peer.url, state, reason_skipped)


def _to_json(url: str, node: str | None, state: str, reason: str | None) -> dict[str, Any]:
    return {"url": url, "id": node, "state": state, "reason": reason}

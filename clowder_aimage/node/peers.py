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
from clowder_aimage.registry.peer import PeerClient, PeerError, addresses_of

LIVE, SILENT = "live", "silent"
LATE = 6  # failures that a late response counts for: a minute
_ADDRESS = re.compile(r"(?:(https?)://|(dns):)?\[?([A-Za-z0-9._:%-]{1,253})\]?:([0-9]{1,5})/?")
_MAX_ADDRESSES = 4096  # per name
_THREADS = 8
_RATE = 10.0  # pings per second: with a thousand peers, each is pinged less often
_TICK = 0.5  # seconds between two checks for due pings
_FIRST_TIMEOUT = 2.0  # seconds that a pull waits for the first pings

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
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or not 0 < int(found[4]) < 65536:
        raise UsageError(
            f"invalid neighbour address {text!r}",
            hint="use HOST:PORT, https://HOST:PORT, or dns:NAME:PORT for all addresses of a name",
        )
    return Endpoint(found[1] or found[2] or "http", found[3], int(found[4]))


def urls_of(peer: Endpoint) -> list[str]:
    """Return the URLs to ping for a configured address, without link-local addresses of a name.

    Nodes are never reachable at link-local addresses, but a cloud's metadata service with the
    machine's credentials is (169.254.169.254). Raises OSError or UnicodeError if the look-up fails.
    """
    if peer.scheme != "dns":
        return [str(peer)]
    found = addresses_of(peer.host, peer.port)[:_MAX_ADDRESSES]
    return [str(Endpoint("http", host, peer.port)) for host in found if _is_routable(host)]


def _is_routable(host: str) -> bool:
    found = ipaddress.ip_address(host)
    address = getattr(found, "ipv4_mapped", None) or found
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)


@dataclass(eq=False)
class Peer:
    """The state of a node. All fields are guarded by the lock of ``Peers``."""

    url: str
    id: str | None = None
    is_alive: bool = False
    reason: str | None = "not contacted yet"
    due: float = 0.0  # time of the next ping
    failures: int = 0  # since the last range received
    retry_at: float = 0.0  # the node is skipped until then
    reported: str = SILENT

    def state(self, now: float) -> tuple[str, str | None]:
        """Return LIVE or SILENT, and the reason for which the node is skipped."""
        if not self.is_alive:
            return SILENT, self.reason
        return LIVE, self.reason if self.retry_at > now else None


class Peers:
    """The nodes at ``addresses()``, which is called each time. Thread-safe.

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
        self._known: dict[str, Peer] = {}
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
        """Return whether any peers may be configured."""
        return bool(self._addresses())

    def wait(self) -> None:
        """Wait, for a limited time, until all nodes have been pinged once."""
        if self._thread.is_alive():
            self._began.wait(_FIRST_TIMEOUT)

    def usable(self) -> dict[str, Peer]:
        """Return the nodes that may be queried now, by id."""
        now = self._clock()
        with self._lock:
            usable = [one for one in self._known.values() if one.is_alive and one.retry_at <= now]
        return {one.id: one for one in usable if one.id and one.id != self._node}

    def states(self) -> list[dict[str, Any]]:
        """Return ``url``, ``id``, ``state`` and ``reason`` of each other node."""
        now = self._clock()
        with self._lock:
            known = [self._known[url] for url in sorted(self._known)]
            states = [
                _to_json(one.url, one.id, *one.state(now)) for one in known if one.id != self._node
            ]
            lost = [each for each, found in self._looked_up.items() if not found]
        reason = "cannot resolve the name"
        return states + [_to_json(f"dns:{each.authority}", None, SILENT, reason) for each in lost]

    def succeeded(self, one: Peer) -> None:
        """Record that a range was received from a node."""
        with self._lock:
            one.failures, one.retry_at = 0, 0.0

    def failed(self, one: Peer, reason: str, *, cost: int = 1) -> None:
        """Skip a node temporarily, twice as long each time, and ping it at once."""
        with self._lock:
            if one.retry_at > self._clock():
                return  # the same failure on another connection
            one.failures += cost
            pause = min(self.limits.longest, 2.0 ** min(one.failures, 20))
            one.retry_at = self._clock() + pause
            one.reason, one.due = reason, 0.0
        self._wake.set()

    def _run(self) -> None:
        with ThreadPoolExecutor(_THREADS, "aimage-peer") as pool:
            while not self._closed.is_set():
                try:
                    self._look_up()
                    list(pool.map(self._ping, self._due()))
                except Exception as error:  # the thread must not end
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
        for each in configured:
            if is_due or each not in self._looked_up:
                try:
                    self._looked_up[each] = urls_of(each)
                except (OSError, UnicodeError):
                    self._looked_up.setdefault(each, [])
        found = {url for each in configured for url in self._looked_up[each]}
        with self._lock:
            self._known = {url: self._known.get(url) or Peer(url) for url in found}

    def _due(self) -> list[Peer]:
        now = self._clock()
        with self._lock:
            every = max(self.limits.ping, len(self._known) / _RATE)
            due = [one for one in self._known.values() if one.due <= now]
            for one in due:
                one.due = now + every * random.uniform(0.8, 1.2)  # noqa: S311 - desynchronize nodes
        return due

    def _ping(self, one: Peer) -> None:
        if self._closed.is_set():
            return
        try:
            node, reason = self._client.ping(one.url), ""
        except PeerError as error:
            node, reason = "", error.message
        with self._lock:
            one.is_alive = bool(node)
            if not node:
                one.reason = reason
            elif one.id != node:
                one.id, one.failures, one.retry_at = node, 0, 0.0
            state, why = one.state(self._clock())
            has_changed = state != one.reported and one.id != self._node
            one.reported = state
        if has_changed:
            self._on_state(one.url, state, why)


def _to_json(url: str, node: str | None, state: str, reason: str | None) -> dict[str, Any]:
    return {"url": url, "id": node, "state": state, "reason": reason}

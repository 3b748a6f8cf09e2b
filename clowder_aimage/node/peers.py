"""The other nodes: their addresses, and which of them answer.

Addresses are configured as ``HOST:PORT``, ``http://HOST:PORT``, ``https://HOST:PORT``, or
``dns:NAME:PORT`` for all addresses that a name has at the moment. One thread pings each of them
now and then; a node whose answers fail is left out for twice as long each time.
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
from clowder_aimage.registry.peer import PeerAddress, PeerClient, PeerError, addresses_of

LIVE, SILENT = "live", "silent"
LATE = 6  # failures that a late answer counts for: a minute
_MAX_ADDRESSES = 4096  # of one name
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_THREADS = 8
_RATE = 10.0  # pings a second: with a thousand peers each is pinged less often
_TICK = 0.5  # seconds between two looks at which pings are due
_FIRST_TIMEOUT = 2.0  # seconds that a pull waits for the first pings

_log = logging.getLogger("aimage.node")


@dataclass(frozen=True, slots=True)
class ConfiguredPeer:
    """An address as it is configured; with ``is_name`` it stands for all addresses of its host."""

    address: PeerAddress
    is_name: bool = False

    @classmethod
    def parse(cls, text: str) -> ConfiguredPeer:
        """Parse an address. Raises UsageError."""
        is_name, is_secure, rest = False, False, text.strip()
        if rest.startswith("dns:"):
            is_name, rest = True, rest.removeprefix("dns:")
        elif rest.startswith(("http://", "https://")):
            is_secure = rest.startswith("https://")
            rest = rest.partition("://")[2].removesuffix("/")
        try:
            endpoint = Endpoint.parse_listen(rest)
        except UsageError:
            endpoint = None
        if endpoint is None or not endpoint.port or not _HOST.fullmatch(endpoint.host):
            raise UsageError(
                f"{text!r} is not the address of a neighbour",
                hint="write HOST:PORT, https://HOST:PORT, or dns:NAME:PORT for all addresses of a "
                "name",
            )
        return cls(PeerAddress(endpoint.host, endpoint.port, is_secure), is_name)

    def addresses(self) -> list[PeerAddress]:
        """Return the addresses to ping, without link-local ones.

        No node reaches another one by a link-local address, but the credentials of a cloud's
        machine are at one (169.254.169.254).

        Raises:
            OSError, UnicodeError: the name cannot be looked up.
        """
        if not self.is_name:
            return [self.address]
        port = self.address.port
        found = addresses_of(self.address.host, port)[:_MAX_ADDRESSES]
        return [PeerAddress(host, port) for host in found if _is_routable(host)]


def _is_routable(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(found, "ipv4_mapped", None) or found
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)


@dataclass(frozen=True, slots=True)
class PeerIntervals:
    """Intervals in seconds.

    ``ping``: between two pings of a node; ``lookup``: between two look-ups of a name; ``longest``:
    for which a node that fails is left out at most.
    """

    ping: float = 3.0
    lookup: float = 30.0
    longest: float = 600.0


@dataclass(eq=False)
class Peer:
    """The state of one node. All fields are guarded by the lock of ``Peers``."""

    address: PeerAddress
    id: str | None = None
    is_alive: bool = False
    reason: str | None = "not asked yet"
    due: float = 0.0  # time of the next ping
    failures: int = 0  # since the last range that came
    retry_at: float = 0.0  # until then it is left out
    reported: str = SILENT


class Peers:
    """The nodes at ``addresses()``, which is called anew each time. Threads may share it.

    ``node`` is the id of this node: an address that answers with it is left out.
    ``on_state(url, state, reason)`` is called when a node becomes live or silent.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        client: PeerClient,
        node: str,
        *,
        intervals: PeerIntervals | None = None,
        on_state: Callable[[str, str, str | None], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses, self._client, self._node = addresses, client, node
        self._intervals = intervals or PeerIntervals()
        self._on_state, self._clock = on_state, clock
        self._lock = threading.Lock()
        self._known: dict[PeerAddress, Peer] = {}
        self._looked_up: dict[ConfiguredPeer, list[PeerAddress]] = {}
        self._next_lookup = 0.0
        self._wake, self._began, self._closed = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="aimage-peers", daemon=True)

    def start(self) -> None:
        """Start to ping."""
        self._thread.start()

    def close(self) -> None:
        """Stop to ping."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._intervals.ping)

    @property
    def is_configured(self) -> bool:
        """True if there may be any."""
        return bool(self._addresses())

    def wait(self) -> None:
        """Wait until all were pinged once, for a moment at most."""
        if self._thread.is_alive():
            self._began.wait(_FIRST_TIMEOUT)

    def usable(self) -> dict[str, Peer]:
        """Return the nodes that may be asked now, by their ids."""
        now = self._clock()
        with self._lock:
            return {one.id: one for one in self._known.values() if one.id and self._may(one, now)}

    def is_usable(self, one: Peer) -> bool:
        """Return True if a node may still be asked."""
        with self._lock:
            return self._may(one, self._clock())

    def _may(self, one: Peer, now: float) -> bool:
        return one.is_alive and one.retry_at <= now and one.id not in (None, self._node)

    def states(self) -> list[dict[str, Any]]:
        """Return ``url``, ``id``, ``state`` and ``reason`` of all other nodes."""
        now = self._clock()
        with self._lock:
            known = [
                {"url": str(one.address), "id": one.id, "state": state, "reason": reason}
                for one in sorted(self._known.values(), key=lambda one: one.address)
                if one.id != self._node
                for state, reason in [_state(one, now)]
            ]
            lost = [each.address for each, found in self._looked_up.items() if not found]
        reason = "the name cannot be looked up"
        return known + [
            {"url": f"dns:{each.host}:{each.port}", "id": None, "state": SILENT, "reason": reason}
            for each in lost
        ]

    def succeeded(self, one: Peer) -> None:
        """Note that a range came from a node."""
        with self._lock:
            one.failures, one.retry_at = 0, 0.0

    def failed(self, one: Peer, reason: str, *, cost: int = 1) -> None:
        """Leave a node out for a while, twice as long each time, and ping it at once."""
        with self._lock:
            if one.retry_at > self._clock():
                return  # the same failure on another connection
            one.failures += cost
            pause = min(self._intervals.longest, 2.0 ** min(one.failures, 20))
            one.retry_at = self._clock() + pause
            one.reason, one.due = reason, 0.0
        self._wake.set()

    # -- the thread

    def _run(self) -> None:
        with ThreadPoolExecutor(_THREADS, "aimage-peer") as pool:
            while not self._closed.is_set():
                try:
                    self._look_up()
                    list(pool.map(self._ping, self._due()))
                except Exception as error:  # the thread must not end
                    _log.error("cannot ping the neighbours", extra={"reason": str(error)})
                self._began.set()
                self._wake.wait(min(_TICK, self._intervals.ping))
                self._wake.clear()

    def _look_up(self) -> None:
        """Update the addresses; of a name that cannot be looked up the last ones count."""
        configured = list(map(ConfiguredPeer.parse, self._addresses()))
        is_due = self._clock() >= self._next_lookup
        if is_due:
            self._next_lookup = self._clock() + self._intervals.lookup
        for each in configured:
            if is_due or each not in self._looked_up:
                try:
                    self._looked_up[each] = each.addresses()
                except (OSError, UnicodeError):
                    self._looked_up.setdefault(each, [])
        found = {address for each in configured for address in self._looked_up[each]}
        with self._lock:
            for address in found - self._known.keys():
                self._known[address] = Peer(address)
            for address in self._known.keys() - found:
                del self._known[address]

    def _due(self) -> list[Peer]:
        now = self._clock()
        with self._lock:
            every = max(self._intervals.ping, len(self._known) / _RATE)
            due = [one for one in self._known.values() if one.due <= now]
            for one in due:
                one.due = now + every * random.uniform(0.8, 1.2)  # noqa: S311 - no two in step
        return due

    def _ping(self, one: Peer) -> None:
        if self._closed.is_set():
            return
        try:
            node = self._client.ping(one.address)
        except PeerError as error:
            with self._lock:
                one.is_alive, one.reason = False, error.message
        else:
            with self._lock:
                if one.id != node:
                    one.failures, one.retry_at = 0, 0.0
                one.is_alive, one.id = True, node
        self._report(one)

    def _report(self, one: Peer) -> None:
        with self._lock:
            state, reason = _state(one, self._clock())
            is_news = state != one.reported and one.id != self._node
            one.reported = state
        if is_news:
            self._on_state(str(one.address), state, reason)


def _state(one: Peer, now: float) -> tuple[str, str | None]:
    if not one.is_alive:
        return SILENT, one.reason
    return LIVE, one.reason if one.retry_at > now else None

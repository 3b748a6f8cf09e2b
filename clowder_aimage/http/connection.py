"""Connections of clients: their number, and the time in which they must send a request.

A client that opens many connections, or sends headers a byte at a time, leaves room for others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
from collections import Counter
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

# Seconds from the start of a connection, or from the first byte of a request, to its last header
HEADERS = 10.0
# Seconds between two requests of a connection
IDLE = 60.0
# Number of idle connections above which IDLE_IN_CROWD applies
CROWD = 512
IDLE_IN_CROWD = 2.0  # seconds
# The largest number of connections, and the descriptors that are left to all else
_MOST = 4096
_RESERVE = 256
# The share of the connections that one address may have
_SHARE = 0.75
# Of an IPv6 address, the bits of a network: a site has all addresses in it
_NETWORK_BITS = 64
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)
_log = logging.getLogger("aimage.http")


class IdleTimeout:
    """Closes connections without a request. A request begins when its headers are complete."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy: set[web.RequestHandler] = set()
        # When a connection began to wait, and how long it may
        self._waiting: dict[web.RequestHandler, tuple[float, float]] = {}

    @property
    def middleware(self) -> Middleware:
        """The first middleware of an application."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            self._busy.add(connection)
            try:
                return await handler(request)
            finally:
                self._busy.discard(connection)
                self._waiting[connection] = self._clock(), IDLE

        return middleware

    def receive(self, connection: web.RequestHandler) -> None:
        """Begin the time of a request's headers, unless it has begun, or a request is served."""
        _, limit = self._waiting.get(connection, (0.0, IDLE))
        if connection not in self._busy and limit == IDLE:
            self._waiting[connection] = self._clock(), HEADERS

    def check(self, connections: list[web.RequestHandler]) -> None:
        """Close the ``connections`` that have been without a request for too long."""
        timestamp = self._clock()
        self._waiting = {
            connection: self._waiting.get(connection, (timestamp, HEADERS))
            for connection in connections
            if connection not in self._busy
        }
        most = IDLE_IN_CROWD if len(self._waiting) > CROWD else IDLE
        for connection, (since, limit) in self._waiting.items():
            if timestamp - since > min(limit, most) and connection.transport is not None:
                connection.transport.abort()


class ConnectionLimit:
    """The numbers of open connections: of all clients, and of each address."""

    def __init__(self, most: int) -> None:
        self._most, self._most_of_one = most, max(1, int(most * _SHARE))
        self._total, self._is_refusing = 0, False
        self._by_address: Counter[str] = Counter()

    @classmethod
    def of_process(cls) -> ConnectionLimit:
        """Return the limit that leaves descriptors to all else that the process opens."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return cls(_MOST)
        return cls(min(_MOST, max(descriptors - _RESERVE, descriptors // 2)))

    def add(self, address: str) -> bool:
        """Count a connection; return False if there are too many. ``address`` may be empty."""
        is_full = self._total >= self._most
        if is_full or (address and self._by_address[address] >= self._most_of_one):
            if not self._is_refusing:
                facts = {"open": self._total, "client": address}
                _log.warning("connections are refused: too many are open", extra=facts)
            self._is_refusing = True
            return False
        self._total += 1
        self._by_address[address] += 1
        return True

    def remove(self, address: str) -> None:
        """End a connection that was counted."""
        self._total -= 1
        # One warning for each crowd
        self._is_refusing &= self._total > self._most // 2
        self._by_address[address] -= 1
        # A counter keeps zeros
        if not self._by_address[address]:
            del self._by_address[address]


class Connection(asyncio.Protocol):
    """A connection that is counted, and whose headers have a deadline; ``inner`` reads it."""

    def __init__(
        self, inner: web.RequestHandler, idle: IdleTimeout, limit: ConnectionLimit
    ) -> None:
        self._inner, self._idle, self._limit = inner, idle, limit
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        address = find_client(transport.get_extra_info("peername"))
        if self._limit.add(address):
            self._address = address
            self._inner.connection_made(transport)
        elif isinstance(transport, asyncio.WriteTransport):
            transport.write(_REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._address is not None:
            self._idle.receive(self._inner)
            self._inner.data_received(data)

    def eof_received(self) -> None:
        if self._address is not None:
            self._inner.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self._limit.remove(self._address)
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def find_client(peer: object) -> str:
    """Return the address of a client, of IPv6 its network; empty for a unix socket."""
    if not isinstance(peer, tuple):
        return ""
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))

"""Timeouts of connections: of those without a request, and of those whose client does not read.

A stalled writer would hold a model, an idle connection a descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

IDLE = 60.0  # seconds that a connection may be open without a request
CROWD = 512  # idle connections above which IDLE_IN_CROWD holds
IDLE_IN_CROWD = 2.0  # seconds
WRITE = 60.0  # seconds in which the client must take a byte
INTERVAL = 1.0  # seconds between two checks


class ConnectionTimeout:
    """Base of what watches the connections of a server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    async def watch(self, server: web.Server) -> None:
        """Check the connections of ``server`` until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            self.check(server.connections)

    def check(self, connections: list[web.RequestHandler]) -> None:
        raise NotImplementedError


class IdleTimeout(ConnectionTimeout):
    """Closes connections without a request. A request begins when its head is complete."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._busy: set[web.RequestHandler] = set()
        self._since: dict[web.RequestHandler, float] = {}

    @property
    def middleware(self) -> Middleware:
        """The first of an application's middlewares."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            self._busy.add(connection)
            try:
                return await handler(request)
            finally:
                self._busy.discard(connection)
                self._since[connection] = self._clock()

        return middleware

    def check(self, connections: list[web.RequestHandler]) -> None:
        """Close those of ``connections`` that have been idle for too long."""
        now = self._clock()
        self._since = {
            each: self._since.get(each, now) for each in connections if each not in self._busy
        }
        timeout = IDLE_IN_CROWD if len(self._since) > CROWD else IDLE
        for connection, since in self._since.items():
            if now - since > timeout and connection.transport is not None:
                connection.transport.abort()


class WriteTimeout(ConnectionTimeout):
    """Closes connections whose unsent bytes have not become fewer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._since: dict[web.RequestHandler, tuple[int, float]] = {}

    def check(self, connections: list[web.RequestHandler]) -> None:
        """Close those of ``connections`` that take nothing; their requests end with them."""
        now, seen = self._clock(), {}
        for connection in connections:
            transport = connection.transport
            unsent = transport.get_write_buffer_size() if transport is not None else 0
            if unsent:
                known, since = self._since.get(connection, (unsent, now))
                seen[connection] = (unsent, since if known == unsent else now)
        self._since = seen
        for connection, (_, since) in seen.items():
            if now - since > WRITE and connection.transport is not None:
                connection.transport.abort()

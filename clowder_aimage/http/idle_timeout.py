"""Connections that nobody speaks on, or hardly, are closed: they are not without number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

PATIENCE = 60.0  # seconds that a connection may be open without a request
CROWD = 512  # connections above which that is
HURRY = 2.0  # seconds
EVERY = 1.0  # seconds between two looks


class IdleTimeout:
    """Knows which connections have a request; one is no request until its head is whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy: set[web.RequestHandler] = set()
        self._since: dict[web.RequestHandler, float] = {}

    @property
    def middleware(self) -> Middleware:
        """To stand before all others."""

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

    async def watch(self, server: web.Server) -> None:
        """Close idle connections of ``server``, until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            self.look(server.connections)

    def look(self, connections: list[web.RequestHandler]) -> None:
        """Close those among ``connections`` that have been idle for too long."""
        now = self._clock()
        self._since = {
            each: self._since.get(each, now) for each in connections if each not in self._busy
        }
        patience = HURRY if len(self._since) > CROWD else PATIENCE
        for connection, since in self._since.items():
            if now - since > patience and connection.transport is not None:
                connection.transport.abort()

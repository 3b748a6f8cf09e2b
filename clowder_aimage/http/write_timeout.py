"""Connections whose client has stopped reading: who writes to one waits, and a model with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

PATIENCE = 60.0  # seconds in which not one byte was taken
EVERY = 1.0  # seconds between two looks


class WriteTimeout:
    """Knows since when what waits to be sent has not become less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[web.RequestHandler, tuple[int, float]] = {}

    async def watch(self, server: web.Server) -> None:
        """Close stalled connections of ``server``, until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            self.look(server.connections)

    def look(self, connections: list[web.RequestHandler]) -> None:
        """Close those among ``connections`` that take nothing; their requests end with them."""
        now, seen = self._clock(), {}
        for connection in connections:
            waiting = _waiting(connection)
            if waiting:
                known, since = self._since.get(connection, (waiting, now))
                seen[connection] = (waiting, since if known == waiting else now)
        self._since = seen
        for connection, (_, since) in seen.items():
            if now - since > PATIENCE and connection.transport is not None:
                connection.transport.abort()


def _waiting(connection: web.RequestHandler) -> int:
    """The bytes that are written and not yet sent."""
    transport = connection.transport
    return transport.get_write_buffer_size() if transport is not None else 0

"""The store as a registry that is only read: for other nodes, and whoever else may ask."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from aiohttp import web

from clowder_aimage.distribution.distribution_error import DistributionError
from clowder_aimage.distribution.registry_role import reading_routes
from clowder_aimage.distribution.served_lease import ServedLeases
from clowder_aimage.errors import UsageError
from clowder_aimage.http.route import NODE, Handler, Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference

MOST = 16  # registries whose names are remembered


class ReadOnlyRegistry:
    """The routes of the distribution API that read (distribution-spec, "Pulling").

    ``?ns=HOST`` says which registry is meant, as containerd says it to a mirror ("Registry
    Configuration", hosts.toml). What a client was told is here stays for a while.
    """

    def __init__(self, store: ImageLayout) -> None:
        self._store = store
        self._kept = ServedLeases(store, time.monotonic)
        self._tables: OrderedDict[str, dict[str, Handler]] = OrderedDict()

    def routes(self) -> list[Route]:
        """All of them, for other nodes."""
        return [Route("GET", path, self._answer(path), NODE) for path in self._table("")]

    def turn(self) -> None:
        """Let go of what was kept for long; to be called every now and then."""
        self._kept.turn()

    def close(self) -> None:
        """Let go of everything."""
        self._kept.close()

    def _table(self, host: str) -> dict[str, Handler]:
        """The routes for the names of one registry; those without a host where it is empty."""
        if host not in self._tables:
            found = reading_routes(self._store, self._kept, host)
            self._tables[host] = {one.path: one.handler for one in found}
        self._tables.move_to_end(host)
        while len(self._tables) > MOST:
            self._tables.popitem(last=False)
        return self._tables[host]

    def _answer(self, path: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._table(_namespace(request))[path](request)

        return answer


def _namespace(request: web.Request) -> str:
    """The registry that is meant. Raises ApiError: it is none."""
    host = request.query.get("ns", "")
    try:
        is_host = not host or Reference.parse(f"{host}/x:latest").registry == host
    except UsageError:
        is_host = False
    if not is_host:
        raise DistributionError("NAME_INVALID", {"ns": host[:300]})
    return host

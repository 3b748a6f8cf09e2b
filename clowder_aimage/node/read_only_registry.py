"""The store as a registry that is only read: for other nodes, and other clients."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from aiohttp import web

from clowder_aimage.distribution.distribution_error import DistributionError
from clowder_aimage.distribution.registry_role import reading_routes
from clowder_aimage.distribution.repository_name import digest_of, repository_of
from clowder_aimage.distribution.served_blobs import ServedLeases
from clowder_aimage.errors import UsageError
from clowder_aimage.http.route import NODE, Handler, Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.range_routes import RangeRoutes
from clowder_aimage.oci import Reference
from clowder_aimage.registry.peer import NODE_HEADER

MAX_REGISTRIES = 16  # whose tables are kept


class ReadOnlyRegistry:
    """The routes of the distribution API that read (distribution-spec, "Pulling").

    ``?ns=HOST`` names the registry that is meant, as containerd tells a mirror ("Registry
    Configuration", hosts.toml). Other nodes get ``ranges`` of blobs, too; ``node`` is the id of
    this one. What a client was told is here stays for a while.
    """

    def __init__(
        self, store: ImageLayout, node: str = "", ranges: RangeRoutes | None = None
    ) -> None:
        self._store, self._node, self._ranges = store, node, ranges
        self._kept = ServedLeases(store, time.monotonic)
        self._tables: OrderedDict[str, dict[str, Handler]] = OrderedDict()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route("GET", path, self._answer(path), NODE) for path in self._table("")]

    def turn(self) -> None:
        """Release what was kept for long; to be called now and then."""
        self._kept.turn()

    def close(self) -> None:
        """Release everything."""
        self._kept.close()

    def _table(self, host: str) -> dict[str, Handler]:
        """Return the routes for the names of one registry; of no registry if it is empty."""
        if host not in self._tables:
            found = reading_routes(self._store, self._kept, host)
            self._tables[host] = {one.path: one.handler for one in found}
        self._tables.move_to_end(host)
        while len(self._tables) > MAX_REGISTRIES:
            self._tables.popitem(last=False)
        return self._tables[host]

    def _answer(self, path: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            host = _namespace(request)
            if self._ranges is not None and host and path.endswith("/blobs/{digest}"):
                digest = digest_of(request)
                reference = Reference(host, repository_of(request), None, digest)
                found = await self._ranges.answer(request, reference, digest)
                if found is not None:
                    return found
            found = await self._table(host)[path](request)
            if path == "/v2/" and self._node:
                found.headers[NODE_HEADER] = self._node
            return found

        return answer


def _namespace(request: web.Request) -> str:
    """Return the registry that is meant. Raises DistributionError."""
    host = request.query.get("ns", "")
    try:
        is_host = not host or Reference.parse(f"{host}/x:latest").registry == host
    except UsageError:
        is_host = False
    if not is_host:
        raise DistributionError("NAME_INVALID", {"ns": host[:300]})
    return host

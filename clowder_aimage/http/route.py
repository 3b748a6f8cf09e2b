"""Routes of a server, and the roles that bring them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web

OPEN, INFER, NODE, ADMIN = "open", "infer", "node", "admin"
SCOPES = (OPEN, INFER, NODE, ADMIN)
BODY = 1 << 20  # bytes: a prompt and its parameters need a thousandth of it

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """A route, and the scope of the tokens that may use it.

    Scopes: "open" for everybody (health, version), "infer" to generate and list, "node" for other
    nodes, which may read what is here, "admin" for everything.

    ``request["scope"]`` is the scope of the caller, where it is known: "admin", "infer", "node".
    ``request["id"]`` is the request's id. A handler may set ``request["model"]`` for the log. The
    body has been read, up to ``body`` bytes, when the handler begins; if ``body`` is None the
    handler streams it.
    """

    method: str
    path: str
    handler: Handler
    scope: str
    body: int | None = BODY
    has_head: bool = True

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"{self.scope!r} is not a scope")


def with_head(routes: Iterable[Route]) -> list[Route]:
    """Return the routes, and a HEAD for each GET that has none (RFC 9110, 9.3.2)."""
    every = list(routes)
    known = {(route.method, route.path) for route in every}
    heads = [
        Route("HEAD", route.path, route.handler, route.scope)
        for route in every
        if route.method == "GET" and route.has_head and ("HEAD", route.path) not in known
    ]
    return every + heads


class Role:
    """A registry, a worker, a node: a server has one of these roles, or several."""

    @property
    def is_draining(self) -> bool:
        """The role begins nothing new."""
        return False

    def routes(self) -> list[Route]:
        """Return the routes that the role answers."""
        return []

    def count(self, route: str, status: int) -> None:
        """Count an answered request."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Do the role's own work meanwhile."""
        yield

    async def ready(self) -> None:
        """Note that connections are accepted from now on."""

    async def drain(self, grace: float, hurry: asyncio.Event) -> None:
        """Begin nothing new; end what runs within ``grace`` seconds, or when ``hurry`` is set."""

    def reload(self) -> bool:
        """Read the configuration again; return False if the role reads it only once."""
        return False

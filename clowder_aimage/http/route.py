"""Routes of a server and the roles that define them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from aiohttp import web

from clowder_aimage.config import token_file
from clowder_aimage.http.caller_ledger import CallerLedger
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.operation import BODY, Operation

OPEN, INFER, NODE = "open", token_file.INFER, token_file.NODE
READ, WRITE, ADMIN = token_file.READ, token_file.WRITE, token_file.ADMIN
SCOPES = (OPEN, INFER, NODE, READ, WRITE, ADMIN)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SharedHandler = Callable[[Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """A route and the token scope that it requires.

    Scopes: "open" without a token (health, version), "infer" to generate and list, "node" for
    reads by other nodes, "read" and "write" for pulls from and pushes to a registry, "admin" for
    everything.

    ``request["scope"]`` is the scope of the caller, if known: that of its token, or "admin".
    ``request["id"]`` is the request's id. A handler may set ``request["model"]`` for the log. The
    body has been read, up to ``body`` bytes, before the handler runs; if ``body`` is None, the
    handler streams it.

    ``operation`` describes the route to clients; the OpenAPI document has no others.
    """

    method: str
    path: str
    handler: Handler
    scope: str
    body: int | None = BODY
    has_head: bool = True
    operation: Operation | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"invalid scope {self.scope!r}")


@dataclass(frozen=True, slots=True)
class SharedRoute(Route):
    """A route that requests of this process reach too (``http.local_call``)."""

    handler: SharedHandler


def serve(operation: Operation, handler: Handler) -> Route:
    """Return the route of an operation."""
    return Route(
        operation.method,
        operation.path,
        handler,
        operation.scope,
        operation.limit,
        operation.has_head,
        operation=operation,
    )


def share(operation: Operation, handler: SharedHandler) -> SharedRoute:
    """Return the route of an operation that requests of this process reach too."""
    return SharedRoute(
        operation.method,
        operation.path,
        handler,
        operation.scope,
        operation.limit,
        operation.has_head,
        operation=operation,
    )


def with_head(routes: Iterable[Route]) -> list[Route]:
    """Return the routes, with a HEAD route for each GET route without one (RFC 9110, 9.3.2)."""
    all_routes = list(routes)
    paths = {(route.method, route.path) for route in all_routes}
    heads = [
        Route("HEAD", route.path, route.handler, route.scope)
        for route in all_routes
        if route.method == "GET" and route.has_head and ("HEAD", route.path) not in paths
    ]
    return all_routes + heads


@dataclass(frozen=True, slots=True)
class Exchange:
    """A completed request: its route, status and duration, and the bytes of both bodies."""

    method: str
    route: str
    status: int
    seconds: float
    received: int
    sent: int


class Role:
    """A registry, a worker or a node: a server has one or more roles."""

    @property
    def is_draining(self) -> bool:
        """Return True while the role refuses new work."""
        return False

    @property
    def ledger(self) -> CallerLedger | None:
        """The bounds of the callers of a role whose clients may keep or occupy something."""
        return None

    def build_routes(self) -> list[Route]:
        """Return the routes of the role."""
        return []

    def count(self, exchange: Exchange) -> None:
        """Count a completed request."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the role's background work."""
        yield

    async def list_reasons(self) -> list[dict[str, str]]:
        """Return the reasons against the readiness of the role; each has a ``reason``."""
        return []

    async def signal_ready(self) -> None:
        """Signal that the server is ready."""

    async def drain(self, grace: float, hurry: asyncio.Event) -> None:
        """Refuse new work; finish running work in ``grace`` seconds, or until ``hurry`` is set."""

    def reload(self) -> bool:
        """Reload the configuration; return False if the role does not support it."""
        return False

"""One route of the worker: what is asked, who answers, and who may ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

OPEN, INFER, NODE, ADMIN = "open", "infer", "node", "admin"
SCOPES = (OPEN, INFER, NODE, ADMIN)
BODY = 1 << 20  # bytes: a prompt and its wishes need a thousandth of it

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """``scope``: "open" for anyone (health, version), "infer" for who may generate and list,
    "node" for other nodes, which may read what is here and no more, "admin" for who may pull, push,
    delete, copy, stop, and everything else.

    ``request["scope"]`` is what the caller may do, where one is known: "admin", "infer", "node".
    ``request["id"]`` is the request's id. A route may set ``request["model"]`` for the log. The
    body has been read, up to ``body`` bytes, when the route begins.
    """

    method: str
    path: str
    handler: Handler
    scope: str
    body: int = BODY

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"{self.scope!r} is no scope")

"""The node's HTTP routes: its status, and a retry."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from clowder_aimage.api.request_body import RequestBody, read_body
from clowder_aimage.api.service import Service
from clowder_aimage.errors import StoreError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.route import ADMIN, INFER, Route
from clowder_aimage.node.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable


def routes(
    service: Service, node: Node, neighbours: Callable[[], list[dict[str, Any]]]
) -> list[Route]:
    """Return the node's routes."""
    api = NodeApi(service, node, neighbours)
    return [
        Route("GET", "/v1/node", api.status, INFER),
        Route("POST", "/v1/node/retry", api.retry, ADMIN),
    ]


class _RetryBody(RequestBody):
    ref: str = ""


class NodeApi:
    """The requests that one node answers."""

    def __init__(
        self, service: Service, node: Node, neighbours: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self._service, self._node, self._neighbours = service, node, neighbours

    async def status(self, _: web.Request) -> web.Response:
        """Return the status of the node (docs/api.md, "Node")."""
        node, service = self._node, self._service
        reasons = await asyncio.to_thread(service.readiness.against, (), node.missing())
        reasons = node.against() + reasons
        started = datetime.fromtimestamp(service.started, UTC)
        body = {
            "id": node.id,
            "started": started.isoformat(timespec="seconds"),
            "ready": not reasons and not service.engine.is_draining,
            "reasons": reasons,
            "warnings": node.warnings(),
            "desired": node.desired(),
            "disk": await asyncio.to_thread(self._disk),
            "neighbours": self._neighbours(),
            "models": node.models(),
        }
        return web.json_response(body)

    def _disk(self) -> dict[str, Any]:
        """Return the usage of the disk, without figures where it cannot be measured."""
        try:
            return self._node.disk()
        except (StoreError, OSError):
            marks = self._node.options.marks
            unknown = dict.fromkeys(("total", "free", "used"))
            return unknown | {"high": marks.high, "low": marks.low}

    async def retry(self, request: web.Request) -> web.Response:
        """Retry one model now, or all for an empty body."""
        name = ""
        if (await request.read()).strip():
            name = (await read_body(request, _RetryBody)).ref
        if not self._node.retry(name or None) and name:
            raise ApiError(404, f"{name} is not wanted here", code="not_wanted", param="ref")
        return web.Response(status=202)

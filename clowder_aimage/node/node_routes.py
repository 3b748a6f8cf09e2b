"""The node over HTTP: how it is, what it is to keep, and that it shall try again."""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from clowder_aimage.api.ndjson import read_object, text
from clowder_aimage.api.service import Service
from clowder_aimage.api.storage import decode
from clowder_aimage.errors import FormatError, StoreError
from clowder_aimage.http.api_error import RETRY_AFTER, ApiError
from clowder_aimage.http.route import ADMIN, INFER, Route
from clowder_aimage.node.model_spec import wants_of
from clowder_aimage.node.node import Node, is_of
from clowder_aimage.oci.strict_json import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGEST = 1024 * 1024  # bytes of a list of wants
_log = structlog.get_logger("aimage.node")


def routes(
    service: Service, node: Node, neighbours: Callable[[], list[dict[str, Any]]]
) -> list[Route]:
    """Every route of this interface."""
    api = NodeApi(service, node, neighbours)
    return [
        Route("GET", "/v1/node", api.status, INFER),
        Route("GET", "/v1/node/desired", api.desired, ADMIN),
        Route("PUT", "/v1/node/desired", api.replace, ADMIN, LARGEST),
        Route("DELETE", "/v1/node/desired/{name:.+}", api.drop, ADMIN),
        Route("POST", "/v1/node/retry", api.retry, ADMIN),
    ]


class NodeApi:
    """The routes, over one node."""

    def __init__(
        self, service: Service, node: Node, neighbours: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self._service, self._node, self._neighbours = service, node, neighbours

    async def status(self, _: web.Request) -> web.Response:
        """Everything about the node (schemas: docs/api.md, "Node")."""
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
        """How full it is; without figures where it cannot be asked."""
        try:
            return self._node.disk()
        except (StoreError, OSError):
            marks = self._node.options.marks
            unknown = dict.fromkeys(("total", "free", "used"))
            return unknown | {"high": marks.high, "low": marks.low}

    async def desired(self, _: web.Request) -> web.Response:
        """What the API was told to keep: a list as in the files."""
        with _store_failures():
            wants = await asyncio.to_thread(self._node.wanted.api)
        return web.json_response([want.to_json() for want in wants])

    async def replace(self, request: web.Request) -> web.Response:
        """Let a list be all that the API was told."""
        try:
            wants = wants_of(read_json(await request.read(), "the request's body"))
        except FormatError as error:
            raise ApiError(400, error.message, code="invalid_desired") from None
        with _store_failures():
            await asyncio.to_thread(self._node.wanted.replace_api, wants)
        self._node.wake()
        return web.json_response([want.to_json() for want in wants])

    async def drop(self, request: web.Request) -> web.Response:
        """Forget what the API was told of one model. The name is base64, as in /content/."""
        name = decode(request.match_info["name"])
        with _store_failures():
            is_known = await asyncio.to_thread(self._drop, name)
        if not is_known:
            raise ApiError(404, f"the API was told nothing of {name}", code="not_wanted")
        self._node.wake()
        return web.Response(status=204)

    def _drop(self, name: str) -> bool:
        memory = self._node.wanted
        found = [want.name for want in memory.api() if is_of(name, want)]
        for each in found:
            memory.drop_api(each)
        return bool(found)

    async def retry(self, request: web.Request) -> web.Response:
        """Try again now: one model, or all. An empty body means all."""
        name = ""
        if (await request.read()).strip():
            name = text(await read_object(request), "ref")
        if not self._node.retry(name or None) and name:
            raise ApiError(404, f"{name} is not wanted here", code="not_wanted", param="ref")
        return web.Response(status=202)


@contextlib.contextmanager
def _store_failures() -> Iterator[None]:
    """Say why the store cannot be used, as far as that is no path of this machine: those are for
    the log. Raises ApiError."""
    try:
        yield
    except StoreError as error:
        _log.warning("what the API was told cannot be read or kept", reason=error.message)
        number = getattr(error.__cause__, "errno", None)
        reason = os.strerror(number) if number else "the node's log says why"
        raise ApiError(
            503,
            f"the store cannot be used: {reason}",
            code="store_failed",
            headers={"Retry-After": str(RETRY_AFTER)},
        ) from None

"""The gateway as a role of a server: the routes of a worker, served by a fleet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from clowder_aimage.api import ollama_routes, page
from clowder_aimage.api.health import DESCRIPTION
from clowder_aimage.api.picture import picture_link
from clowder_aimage.api.text.openai_text import MAX_BODY
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.fleet import wish
from clowder_aimage.fleet.fleet_link import FleetLink
from clowder_aimage.fleet.fleet_status import FleetStatus
from clowder_aimage.fleet.gateway import JobGateway
from clowder_aimage.fleet.gateway_metric import GatewayMetrics
from clowder_aimage.fleet.wish import Wish, WishReader
from clowder_aimage.fleet.worker_card import RosterWatch
from clowder_aimage.http.api_error import RETRY_AFTER, ApiError
from clowder_aimage.http.background import beside
from clowder_aimage.http.metrics_role import MetricsRole
from clowder_aimage.http.route import ADMIN, BODY, INFER, OPEN, Exchange, Role, Route
from clowder_aimage.oci import Digest, Reference, read_json


class GatewayRole(Role):
    """The interfaces of a worker without models: requests become jobs, lists are those of all."""

    def __init__(
        self,
        link: FleetLink,
        metrics: GatewayMetrics,
        *,
        resolve: Callable[[Reference], Digest],
        **options: Any,
    ) -> None:
        self._link, self._metrics = link, metrics
        self._watch = RosterWatch(link)
        self._gateway = JobGateway(link, self._watch, metrics, resolve=resolve, **options)
        self._wishes = WishReader(self._kind_of)
        self._status = FleetStatus(link, self._watch.roster)
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def routes(self) -> list[Route]:
        jobs = [
            Route("POST", path, self._job, INFER, None if path in wish.WITH_PICTURES else MAX_BODY)
            for path in wish.PATHS
        ]
        same = ollama_routes.open_routes() + page.routes(is_shown=False)
        return [
            *jobs,
            *same,
            Route("GET", "/healthz", self._alive, OPEN),
            Route("GET", "/readyz", self._ready, OPEN),
            Route("GET", "/openapi.json", self._describe, OPEN),
            *MetricsRole(self._metrics.text, INFER).routes(),
            Route("GET", "/v1/fleet", self._fleet, INFER),
            Route("GET", "/v1/models", self._models, INFER),
            Route("GET", "/v1/models/{id:.+}", self._one, INFER),
            Route("GET", picture_link.PATH + "{name}", self._one, OPEN),
            Route("GET", "/api/tags", self._tags, INFER),
            Route("GET", "/api/ps", self._loaded, INFER),
            Route("POST", "/api/show", self._one, INFER, BODY),
        ]

    def count(self, exchange: Exchange) -> None:
        self._metrics.requests.labels(exchange.route, str(exchange.status)).inc()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self._link.open(),
            beside(self._watch.run(), self._status.observe(self._metrics, self._gateway.line)),
        ):
            yield

    async def drain(self, grace: float, hurry: Any) -> None:  # noqa: ARG002
        self._is_draining = True

    # -- jobs

    def _kind_of(self, name: str | None) -> str:
        try:
            found = self._watch.roster.find(name)
        except UsageError:
            return ""
        return found.kind if found else ""

    async def _job(self, request: web.Request) -> web.StreamResponse:
        self._link.check()
        found = await self._wishes.read(request)
        if found.unloads:
            return await self._unload(request, found)
        return await self._gateway.answer(request, found)

    async def _unload(self, request: web.Request, found: Wish) -> web.StreamResponse:
        """Unload or stop a model on all workers. Raises ApiError."""
        if request.get("scope") != ADMIN:
            message = "the scope admin is required to unload models"
            raise ApiError(403, message, code="insufficient_scope")
        answers = await self._gateway.call_all(request, request.path, found.fields)
        return _first(answers)

    # -- lists

    async def _models(self, request: web.Request) -> web.StreamResponse:
        found = await self._merged(request, "data", "id")
        return web.json_response({"object": "list", "data": found})

    async def _tags(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"models": await self._merged(request, "models", "name")})

    async def _loaded(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"models": await self._merged(request, "models", "digest")})

    async def _merged(self, request: web.Request, field: str, key: str) -> list[dict[str, Any]]:
        """Return the entries of the lists of all workers, each once, in the first order."""
        found: dict[str, dict[str, Any]] = {}
        for status, _, body in await self._gateway.call_all(request, request.path):
            value = read_json(body, "a list") if status == 200 else {}
            for entry in value.get(field, ()):
                found.setdefault(str(entry.get(key)), entry)
        return list(found.values())

    async def _one(self, request: web.Request) -> web.StreamResponse:
        """Respond as the first worker that has what is asked for."""
        raw = await request.read()
        fields = read_json(raw, "the request body") if raw.strip() else None
        path = request.rel_url.raw_path_qs
        return _first(await self._gateway.call_all(request, path, fields))

    # -- the gateway itself

    async def _alive(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        """Respond whether jobs can be put on the queue; a fleet without workers is ready."""
        reasons = []
        try:
            self._link.check()
        except AImageError as error:
            reasons = [{"reason": error.message}]
        if self._is_draining:
            reasons.insert(0, {"reason": "draining"})
        headers = {"Retry-After": str(RETRY_AFTER)} if reasons else {}
        body = {"status": "unavailable" if reasons else "ok", "reasons": reasons}
        return web.json_response(body, status=503 if reasons else 200, headers=headers)

    async def _describe(self, _: web.Request) -> web.Response:
        return web.Response(text=DESCRIPTION.read_text("utf-8"), content_type="application/json")

    async def _fleet(self, _: web.Request) -> web.Response:
        self._link.check()
        return web.json_response(await self._status.read())


def _first(answers: list[tuple[int, str, bytes]]) -> web.Response:
    """Return the first response that is not an error, else the first one. Raises ApiError."""
    if not answers:
        raise ApiError(504, "no worker responded", code="deadline_exceeded")
    status, kind, body = next((one for one in answers if one[0] < 400), answers[0])
    return web.Response(body=body, status=status, headers={"Content-Type": kind} if kind else {})

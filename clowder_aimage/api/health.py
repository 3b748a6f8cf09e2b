"""The health, readiness, metrics, events and OpenAPI 3.1 description of a worker."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from clowder_aimage import __version__
from clowder_aimage.api.answer_stream import EventStream, comment, frame, ticking
from clowder_aimage.api.service import Service
from clowder_aimage.engine.executor import run_probe
from clowder_aimage.http.api_error import RETRY_AFTER, ApiError
from clowder_aimage.http.metrics_role import MetricsRole
from clowder_aimage.http.route import INFER, OPEN, Route

DESCRIPTION = Path(__file__).with_name("openapi.json")
ALIVE = 15.0  # seconds of silence before a comment is sent


def routes(service: Service) -> list[Route]:
    """Return the routes of health, metrics, events and the description."""
    health = Health(service)
    return [
        Route("GET", "/healthz", health.alive, OPEN),
        Route("GET", "/readyz", health.ready, OPEN),
        Route("GET", "/v1/worker", health.worker, OPEN),
        *MetricsRole(service.metrics.text, INFER).routes(),
        Route("GET", "/v1/events", health.events, INFER),
        *description_routes(),
    ]


def description_routes() -> list[Route]:
    """Return the routes of the description: as JSON, and as a page for a browser."""
    text = DESCRIPTION.read_text("utf-8")

    async def describe(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    async def show(_: web.Request) -> web.Response:
        from clowder_aimage.api.description_page import POLICY, page

        headers = {"Content-Security-Policy": POLICY}
        shown = page(json.loads(text))
        return web.Response(text=shown, content_type="text/html", headers=headers)

    return [
        Route("GET", "/openapi.json", describe, OPEN),
        Route("GET", "/docs", show, OPEN),
    ]


class Health:
    """The handlers for one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def alive(self, _: web.Request) -> web.Response:
        """Respond that the event loop runs, without further checks."""
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """Respond with the readiness. Models are named only to requests with a token."""
        service, node = self._service, self._service.node
        missing = node.missing() if node is not None else ()
        try:
            reasons = await run_probe(service.readiness.against, service.required, missing)
        except TimeoutError:
            reasons = [{"reason": "store not readable"}]
        if node is not None:
            reasons = node.against() + reasons
        if service.engine.is_draining:
            reasons.insert(0, {"reason": "draining"})
        if request.get("scope") is None:
            reasons = [{"reason": each["reason"]} for each in reasons]
        body: dict[str, Any] = {"status": "unavailable" if reasons else "ok", "reasons": reasons}
        if node is not None:
            body["warnings"] = list(node.warnings())
        headers = {"Retry-After": str(RETRY_AFTER)} if reasons else {}
        return web.json_response(body, status=503 if reasons else 200, headers=headers)

    async def worker(self, request: web.Request) -> web.Response:
        """Respond with what the token of the request allows; its settings only with a token."""
        scope, settings = request.get("scope"), self._service.settings
        body: dict[str, Any] = {"version": __version__, "scope": scope}
        if scope is not None:
            body |= {"default_model": settings.default_model, "enhancer": settings.enhancer}
        return web.json_response(body)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream events as server-sent events (HTML, 9.2), from ``Last-Event-ID`` on."""
        mark = f"{self._service.started:.3f}-"  # event numbers restart with each worker
        last = request.headers.get("Last-Event-ID", "")
        after = last.removeprefix(mark) if last.startswith(mark) else "0"
        if not after.isascii() or not after.isdigit() or len(after) > 15:
            raise ApiError(400, "invalid Last-Event-ID", param="Last-Event-ID")
        answer = EventStream(request)
        await answer.open()
        if request.method == "HEAD":
            return answer.response
        await answer.send(b"retry: 2000\n\n")
        items = ticking(self._service.events.listen(int(after)), ALIVE)
        async with contextlib.aclosing(items):
            async for item in items:
                if item is None:
                    await answer.send(comment("alive"))
                    continue
                facts = {"at": item.at, **item.facts}
                await answer.send(frame(item.kind, facts, mark=f"{mark}{item.id}"))
        return await answer.close()

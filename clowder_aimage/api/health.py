"""The health, readiness, metrics and events of a worker."""

from __future__ import annotations

import contextlib
from typing import Any

from aiohttp import web

from clowder_aimage import __version__
from clowder_aimage.api import health_operation as operation
from clowder_aimage.api.answer_stream import (
    EventStream,
    encode_comment,
    encode_event,
    with_keepalive,
)
from clowder_aimage.api.batch.store import is_almost_full
from clowder_aimage.api.service import Service
from clowder_aimage.engine.executor import run_io
from clowder_aimage.engine.queued_request import ModelSlot
from clowder_aimage.http.api_error import RETRY_AFTER, ApiError
from clowder_aimage.http.metrics_role import MetricsRole
from clowder_aimage.http.route import INFER, Route, serve

# Seconds of silence before a comment is sent
ALIVE = 15.0


def build_routes(service: Service, reserve: int = 0) -> list[Route]:
    """Return the routes of health, metrics and events. ``reserve`` is that of the disk."""
    health = Health(service, reserve)
    return [
        serve(operation.ALIVE, health.report_liveness),
        serve(operation.READY, health.report_readiness),
        serve(operation.WORKER, health.describe_worker),
        *MetricsRole(service.metrics.format_text, INFER).build_routes(),
        serve(operation.EVENTS, health.stream_events),
    ]


def _describe_batches(model: ModelSlot) -> dict[str, Any]:
    limits = [] if model.runner is None else model.runner.batches.to_json()
    return {"model": str(model.reference), "limits": limits, "requests": len(model.served)}


class Health:
    """The handlers for one service."""

    def __init__(self, service: Service, reserve: int) -> None:
        self._service, self._reserve = service, reserve

    async def report_liveness(self, _: web.Request) -> web.Response:
        """Respond that the event loop runs, without further checks."""
        return web.json_response({"status": "ok"})

    async def report_readiness(self, request: web.Request) -> web.Response:
        """Respond with the readiness. Details are only for requests with a token."""
        service, node = self._service, self._service.node
        reasons = await service.list_reasons()
        if request.get("scope") is None:
            reasons = [{"reason": reason["reason"]} for reason in reasons]
        body: dict[str, Any] = {"status": "unavailable" if reasons else "ok", "reasons": reasons}
        warnings = list(node.list_warnings()) if node is not None else []
        if await run_io(is_almost_full, service.store.root, self._reserve):
            # Pictures and texts are still made, so it is not a reason against the readiness
            warnings.append("the disk of the store is almost full: no files and batches")
        if node is not None or warnings:
            body["warnings"] = warnings
        headers = {"Retry-After": str(RETRY_AFTER)} if reasons else {}
        return web.json_response(body, status=503 if reasons else 200, headers=headers)

    async def describe_worker(self, request: web.Request) -> web.Response:
        """Respond with the scope of the token; with the settings only if there is a token."""
        scope, settings = request.get("scope"), self._service.settings
        body: dict[str, Any] = {"version": __version__, "scope": scope}
        if scope is not None:
            body |= {"default_model": settings.default_model, "enhancer": settings.enhancer}
            body["batches"] = [*map(_describe_batches, self._service.engine.list_loaded())]
        return web.json_response(body)

    async def stream_events(self, request: web.Request) -> web.StreamResponse:
        """Stream events as server-sent events (HTML, 9.2), from ``Last-Event-ID`` on."""
        # Event numbers restart with each worker
        mark = f"{self._service.started:.3f}-"
        last_id = request.headers.get("Last-Event-ID", "")
        after = last_id.removeprefix(mark) if last_id.startswith(mark) else "0"
        if not after.isascii() or not after.isdigit() or len(after) > 15:
            raise ApiError(400, "invalid Last-Event-ID", param="Last-Event-ID")
        answer = EventStream(request)
        await answer.open()
        if request.method == "HEAD":
            return answer.response
        await answer.send(b"retry: 2000\n\n")
        events = with_keepalive(self._service.events.listen(int(after)), ALIVE)
        async with contextlib.aclosing(events):
            async for event in events:
                if event is None:
                    await answer.send(encode_comment("alive"))
                    continue
                facts = {"at": event.at, **event.facts}
                await answer.send(encode_event(event.kind, facts, mark=f"{mark}{event.id}"))
        return await answer.close()

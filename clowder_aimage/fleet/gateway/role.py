"""The gateway as a role of a server: the routes of a worker, served by a fleet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from clowder_aimage import __version__
from clowder_aimage.api import health_operation, page
from clowder_aimage.api.batch.routes import BatchRoutes
from clowder_aimage.api.batch.run import BatchRunner
from clowder_aimage.api.ollama import routes as ollama_routes
from clowder_aimage.api.openapi import build_description_routes
from clowder_aimage.api.request_body import read_headers
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.fleet.gateway import operation as gateway_operation
from clowder_aimage.fleet.gateway.batch_store import FleetBatchStore
from clowder_aimage.fleet.gateway.gateway import JobGateway
from clowder_aimage.fleet.gateway.metric import ANSWER, STATUS, GatewayMetrics
from clowder_aimage.fleet.gateway.parsed_request import ParsedRequest, RequestValidator
from clowder_aimage.fleet.gateway.settings import GatewaySettings
from clowder_aimage.fleet.gateway.status import FleetStatus
from clowder_aimage.fleet.gateway.worker_call import WorkerCalls, select_first
from clowder_aimage.fleet.job.envelope import INLINE
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.worker_registry import WorkerWatch
from clowder_aimage.http.api_error import RETRY_AFTER, ApiError
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.caller_ledger import CallerBounds, CallerLedger
from clowder_aimage.http.local_call import LocalCalls
from clowder_aimage.http.local_request import Request, count_body
from clowder_aimage.http.metrics_role import MetricsRole
from clowder_aimage.http.route import ADMIN, INFER, Exchange, Role, Route, serve, share
from clowder_aimage.oci import Digest, Reference


class GatewayRole(Role):
    """The interfaces of a worker without models: requests become jobs, lists are those of all."""

    def __init__(
        self,
        link: FleetLink,
        metrics: GatewayMetrics,
        *,
        resolve: Callable[[Reference], Digest],
        advice: Callable[[AImageError], str | None] | None = None,
        tokens: Mapping[str, str] | None = None,
        bounds: CallerBounds | None = None,
        **options: Any,
    ) -> None:
        self._link, self._metrics = link, metrics
        self._watch = WorkerWatch(link, metrics.rejected.labels(STATUS).inc)
        self._ledger = CallerLedger(bounds or CallerBounds.of(GatewaySettings()))
        self._gateway = JobGateway(
            link, self._watch, metrics, bounds=self._ledger.bounds, resolve=resolve, **options
        )
        self._calls = WorkerCalls(link, self._watch.workers, metrics.rejected.labels(ANSWER).inc)
        self._validator = RequestValidator(self._find_kind)
        calls = LocalCalls(self, advice)
        self._batches = BatchRunner(
            FleetBatchStore(link),
            calls,
            self._gateway.compute_window,
            tokens=tokens,
            ledger=self._ledger,
        )
        self._status = FleetStatus(link, self._watch.workers)
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def ledger(self) -> CallerLedger:
        return self._ledger

    def build_routes(self) -> list[Route]:
        return [
            *(share(job, self._serve_job) for job in gateway_operation.JOBS),
            *ollama_routes.build_open_routes(),
            *page.build_routes(is_shown=True),
            *build_description_routes("gateway"),
            serve(health_operation.ALIVE, self._report_liveness),
            serve(health_operation.READY, self._report_readiness),
            serve(health_operation.WORKER, self._describe_worker),
            *MetricsRole(self._metrics.format_text, INFER).build_routes(),
            serve(gateway_operation.FLEET, self._describe_fleet),
            *self._calls.build_routes(),
            *BatchRoutes(self._batches).build_routes(),
        ]

    def count(self, exchange: Exchange) -> None:
        self._metrics.requests.labels(exchange.route, str(exchange.status)).inc()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self._link.open(),
            run_in_background(
                self._watch.run(),
                self._status.observe(self._metrics, self._gateway.queue),
                self._batches.run(),
            ),
        ):
            yield

    async def drain(self, grace: float, hurry: Any) -> None:  # noqa: ARG002
        self._is_draining = True

    # -- jobs

    def _find_kind(self, name: str | None) -> str:
        try:
            model = self._watch.workers.find(name)
        except (NotFoundError, UsageError):
            return ""
        return model.kind if model else ""

    async def _serve_job(self, request: Request) -> web.StreamResponse:
        self._link.check()
        headers = read_headers(request, gateway_operation.JobHeaders)
        parsed = await self._validator.read(request)
        if parsed.unloads:
            return await self._unload(request, parsed)
        size = count_body(request)
        # Smaller ones are in the message of the job
        with self._link.hold_space(size if size > INLINE else 0):
            return await self._gateway.answer(request, parsed, headers)

    async def _unload(self, request: Request, parsed: ParsedRequest) -> web.StreamResponse:
        """Unload or stop a model on all workers. Raises ApiError."""
        if request.get("scope") != ADMIN:
            message = "the scope admin is required to unload models"
            raise ApiError(403, message, code="insufficient_scope")
        return select_first(await self._calls.call_all(request, parsed.fields)).build_response()

    # -- the gateway itself

    async def _report_liveness(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def list_reasons(self) -> list[dict[str, str]]:
        reasons = self._link.list_reasons()
        try:
            if not reasons:
                self._link.check_space()
        except AImageError as error:
            reasons = [{"reason": error.message}]
        return [*([{"reason": "draining"}] if self._is_draining else ()), *reasons]

    async def _report_readiness(self, request: web.Request) -> web.Response:
        """Respond with the readiness for jobs; a fleet without workers is ready."""
        reasons = await self.list_reasons()
        if request.get("scope") is None:
            reasons = [{"reason": reason["reason"]} for reason in reasons]
        headers = {"Retry-After": str(RETRY_AFTER)} if reasons else {}
        body: dict[str, Any] = {"status": "unavailable" if reasons else "ok", "reasons": reasons}
        if self._link.is_almost_full(files := self._link.names.files):
            body["warnings"] = [f"the stream {files} of the fleet is almost full"]
        return web.json_response(body, status=503 if reasons else 200, headers=headers)

    async def _describe_worker(self, request: web.Request) -> web.Response:
        """Respond as a worker; the name of the fleet identifies a gateway."""
        scope, workers = request.get("scope"), self._watch.workers
        body: dict[str, Any] = {"version": __version__, "scope": scope}
        if scope is not None:
            body |= {"default_model": workers.default_model, "enhancer": None}
            body |= {"fleet": self._link.names.fleet}
        return web.json_response(body)

    async def _describe_fleet(self, _: web.Request) -> web.Response:
        self._link.check()
        return web.json_response(asdict(await self._status.read()))

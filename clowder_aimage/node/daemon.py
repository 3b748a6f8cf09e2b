"""The node's role in a server: its routes and its background work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

from clowder_aimage.api.request_body import RequestBody, read_body
from clowder_aimage.api.service import Service
from clowder_aimage.engine.executor import run_io, run_locking, run_probe
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.route import ADMIN, INFER, NODE, Role, Route
from clowder_aimage.node.node import Node
from clowder_aimage.node.peer_sharing import PeerSharing
from clowder_aimage.node.settings import NodeSettings

# Seconds between two measurements.
EVERY = 5.0
_log = logging.getLogger("aimage.node")


class _RetryBody(RequestBody):
    ref: str = ""


class Daemon(Role):
    """The node of ``service`` and its peers.

    ``tokens`` are the server's tokens with their scopes; peers authenticate with the NODE token.
    """

    def __init__(
        self,
        service: Service,
        settings: NodeSettings,
        tokens: Mapping[str, str],
        *,
        ca_file: Path | None = None,
    ) -> None:
        self.node = Node(service, settings)
        self._service = service
        service.on_removed, service.node = self.node.look_again, self.node
        metrics = self.node.metrics
        # Always needed: other nodes may list this one as a peer.
        self._sharing = PeerSharing(
            service.store,
            service.connection,
            node=self.node.id,
            addresses=lambda: settings.neighbours,
            token=next((token for token, scope in tokens.items() if scope == NODE), None),
            has_repository=self.node.takes_part,
            ca_file=ca_file,
            on_bytes=lambda source, count: service.metrics.pull_bytes.labels(source).inc(count),
            on_traffic=lambda direction, count: metrics.exchanged.labels(direction).inc(count),
            on_state=self._announce,
        )
        self.node.evictor.spare = self._sharing.cache.clear
        if settings.neighbours:
            service.transfers.near = self._sharing.build_source_wrapper

    def build_routes(self) -> list[Route]:
        """Return the node's own routes."""
        return [
            Route("GET", "/v1/node", self.describe_status, INFER),
            Route("POST", "/v1/node/retry", self.retry, ADMIN),
            *self._sharing.registry.build_routes(),
        ]

    async def describe_status(self, _: web.Request) -> web.Response:
        """Return the status of the node (docs/api.md, "Node")."""
        node, reasons = self.node, await self._list_reasons()
        started = datetime.fromtimestamp(self._service.started, UTC)
        body = {
            "id": node.id,
            "started": started.isoformat(timespec="seconds"),
            "ready": not reasons and not self._service.engine.is_draining,
            "reasons": reasons,
            "warnings": node.list_warnings(),
            "desired": node.describe_desired(),
            "disk": await run_io(node.describe_disk),
            "neighbours": self._sharing.peers.list_states(),
            "models": node.describe_models(),
        }
        return web.json_response(body)

    async def retry(self, request: web.Request) -> web.Response:
        """Retry one model at once, or all models for an empty body."""
        name = ""
        if (await request.read()).strip():
            name = (await read_body(request, _RetryBody)).ref
        if not self.node.retry(name or None) and name:
            raise ApiError(404, f"{name} is not a desired model", code="not_wanted", param="ref")
        return web.Response(status=202)

    async def _list_reasons(self) -> list[dict[str, str]]:
        readiness, missing = self._service.readiness, self.node.list_missing()
        try:
            reasons = await run_probe(readiness.list_reasons, (), missing)
        except TimeoutError:
            reasons = [{"reason": "store not readable"}]
        return self.node.list_reasons() + reasons

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reconcile while the server runs."""
        self._service.events.attach()
        self._sharing.peers.start()
        await self.node.begin()
        try:
            async with run_in_background(self.node.run(), self._measure()):
                yield
        finally:
            await run_locking(self._sharing.close)

    def reload(self) -> bool:
        """Reload the desired state."""
        _log.info("reloading the desired state")
        self.node.wake(reload=True)
        return True

    def _announce(self, url: str, state: str, reason: str | None) -> None:
        facts = {"reason": reason} if reason else {}
        self._service.events.record_from_thread("neighbour", url=url, state=state, **facts)

    async def _measure(self) -> None:
        """Measure until cancelled; log a repeated error only once."""
        metrics, logged = self.node.metrics, set[tuple[object, ...]]()
        while True:
            try:
                metrics.ready.set(
                    not await self._list_reasons() and not self._service.engine.is_draining
                )
                states = Counter(peer["state"] for peer in self._sharing.peers.list_states())
                for state in ("live", "silent"):
                    metrics.neighbours.labels(state).set(states[state])
                self._sharing.registry.leases.rotate()
                logged.clear()
            except Exception as error:
                # The state is unknown.
                metrics.ready.set(0)
                kind = (type(error), getattr(error, "errno", None))
                if kind not in logged:
                    _log.exception("cannot update the metrics")
                logged.add(kind)
            await asyncio.sleep(EVERY)

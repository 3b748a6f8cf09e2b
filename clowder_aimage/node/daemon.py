"""A node in a server: what it answers beside a worker's routes, and what it does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from clowder_aimage.api.service import Service
from clowder_aimage.http.background import beside
from clowder_aimage.http.route import NODE, Role, Route
from clowder_aimage.node import node_routes
from clowder_aimage.node.node import Node
from clowder_aimage.node.node_settings import NodeSettings
from clowder_aimage.node.peer_sharing import PeerSharing
from clowder_aimage.node.read_only_registry import ReadOnlyRegistry

EVERY = 5.0  # seconds between two looks at what changes slowly
_log = logging.getLogger("aimage.node")


class Daemon(Role):
    """The node of ``service``, and its neighbours where it has any. ``tokens`` are those that the
    server knows, with their scopes: the nodes' own is what neighbours are shown."""

    def __init__(
        self,
        service: Service,
        settings: NodeSettings,
        tokens: Mapping[str, str],
        *,
        ca_file: Path | None = None,
    ) -> None:
        self.node = Node(service, settings.options)
        self._service = service
        service.has_gone, service.node = self.node.look_again, self.node
        metrics = self.node.metrics
        self._sharing = PeerSharing(  # also without neighbours of our own: others may know us
            service.store,
            service.connection,
            addresses=settings.neighbours,
            token=next((token for token, scope in tokens.items() if scope == NODE), None),
            has_repository=self.node.takes_part,
            node=self.node.id,
            ca_file=ca_file,
            on_bytes=lambda source, count: service.metrics.pull_bytes.labels(source).inc(count),
            on_traffic=lambda direction, count: metrics.exchanged.labels(direction).inc(count),
            on_state=self._heard,
        )
        self._reading = ReadOnlyRegistry(service.store, self.node.id, self._sharing.ranges)
        self.node.spare(self._sharing.clear)
        if settings.neighbours:
            service.transfers.near = self._sharing.near

    def routes(self) -> list[Route]:
        """What is answered beside a worker's routes."""
        own = node_routes.routes(self._service, self.node, self._sharing.states)
        return [*own, *self._reading.routes()]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reconcile meanwhile."""
        self._service.news.attach()
        await asyncio.to_thread(self._sharing.start)
        await self.node.begin()
        try:
            async with beside(self.node.run(), self._measure()):
                yield
        finally:
            await asyncio.to_thread(self._sharing.close)
            self._reading.close()

    def reload(self) -> bool:
        """Read the desired state again."""
        _log.info("reading the desired state again")
        self.node.wake(reload=True)
        return True

    def _heard(self, url: str, state: str, reason: str | None) -> None:
        facts = {"reason": reason} if reason else {}
        self._service.news.tell_from_thread("neighbour", url=url, state=state, **facts)

    async def _measure(self) -> None:
        """Look at what changes slowly, until it is cancelled; a look that fails ends nothing."""
        known: set[tuple[object, ...]] = set()
        while True:
            try:
                await self._look()
                known.clear()
            except Exception as error:
                self.node.metrics.ready.set(0)  # nobody knows
                kind = (type(error), getattr(error, "errno", None))
                if kind not in known:
                    _log.exception("what the node measures is unknown")
                known.add(kind)
            await asyncio.sleep(EVERY)

    async def _look(self) -> None:
        node, metrics = self.node, self.node.metrics
        states = Counter(one["state"] for one in self._sharing.states())
        for state in ("live", "silent"):
            metrics.neighbours.labels(state).set(states[state])
        against = await asyncio.to_thread(self._service.readiness.against, (), node.missing())
        is_ready = not against and not node.against() and not self._service.engine.is_draining
        metrics.ready.set(is_ready)
        self._reading.turn()

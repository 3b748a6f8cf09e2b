"""The status of a fleet: its workers, its queue, and jobs that were given up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from nats.js.errors import Error as JetStreamError

from clowder_aimage.fleet.fair_line import FairLine
from clowder_aimage.fleet.fleet_link import LOST, FleetLink
from clowder_aimage.fleet.gateway_metric import GatewayMetrics
from clowder_aimage.fleet.worker_card import Roster

INTERVAL = 2.0  # seconds between two looks at the queue


class FleetStatus:
    """Reads the status of one fleet."""

    def __init__(self, link: FleetLink, roster: Roster) -> None:
        self._link, self._roster = link, roster
        self._since: float | None = None  # since when the queue was never empty

    async def read(self) -> dict[str, Any]:
        """Return the status as JSON. Raises TimeoutError, NatsError."""
        names, streams = self._link.names, self._link.streams
        jobs = await streams.stream_info(names.jobs, subjects_filter=">")
        logs, dead = await streams.stream_info(names.logs), await streams.stream_info(names.dead)
        queued: Counter[tuple[str, str]] = Counter()
        for subject, count in (jobs.state.subjects or {}).items():
            key = names.wanted(subject)
            if key is not None:
                queued[key] += count
        return {
            "fleet": names.fleet,
            "workers": [asdict(card) for card in self._roster.cards()],
            "queue": [
                {"priority": priority, "digest": f"sha256:{digest}", "jobs": count}
                for (priority, digest), count in sorted(queued.items())
            ],
            "jobs": jobs.state.messages,
            "stored": logs.state.bytes + jobs.state.bytes,
            "room": logs.config.max_bytes,
            "given_up": dead.state.messages,
        }

    async def observe(self, metrics: GatewayMetrics, line: FairLine) -> None:
        """Set the gauges of a gateway, for ever."""
        while True:
            cards = self._roster.cards()
            metrics.workers.set(sum(not card.is_draining for card in cards))
            metrics.waiting.set(line.waiting)
            metrics.connected.set(self._link.is_ready)
            line.look()  # workers may have joined
            with contextlib.suppress(*LOST, JetStreamError):
                if self._link.is_ready:
                    await self._depth(metrics)
            await asyncio.sleep(INTERVAL)

    async def _depth(self, metrics: GatewayMetrics) -> None:
        names, streams = self._link.names, self._link.streams
        jobs = (await streams.stream_info(names.jobs)).state.messages
        metrics.depth.set(jobs)
        metrics.dead.set((await streams.stream_info(names.dead)).state.messages)
        now = time.monotonic()
        self._since = (self._since or now) if jobs else None
        metrics.age.set(0 if self._since is None else now - self._since)

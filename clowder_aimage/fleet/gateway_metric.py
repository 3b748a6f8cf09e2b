"""The metrics of a gateway (Prometheus, "Metric naming")."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, generate_latest

from clowder_aimage.engine.metric import new_registry

_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """The metrics of one gateway, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        name = "aimage_fleet"
        self.requests = Counter(
            "aimage_http_requests", "HTTP requests.", ["route", "code"], registry=registry
        )
        text = "Time from the arrival of a job to its response."
        self.jobs = Histogram(
            f"{name}_job_duration_seconds", text, ["priority"], buckets=_LONG, registry=registry
        )
        self.retries = Counter(
            f"{name}_retries", "Further attempts to serve a job.", registry=registry
        )
        self.cancelled = Counter(
            f"{name}_cancelled", "Jobs whose client disconnected.", registry=registry
        )
        self.waiting = Gauge(
            f"{name}_waiting", "Jobs that wait in this gateway.", registry=registry
        )
        self.workers = Gauge(f"{name}_workers", "Workers that take jobs.", registry=registry)
        self.connected = Gauge(
            f"{name}_connected", "Whether the fleet on NATS can be used.", registry=registry
        )
        self.depth = Gauge(f"{name}_queue_depth", "Jobs on the queue.", registry=registry)
        self.age = Gauge(
            f"{name}_queue_age_seconds",
            "Time for which the queue has not become empty.",
            registry=registry,
        )
        self.dead = Gauge(f"{name}_given_up", "Jobs that were given up.", registry=registry)

    def text(self) -> bytes:
        """Format all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

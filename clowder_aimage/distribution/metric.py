"""The metrics of a served registry. No label is a repository, as their number is unbounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp.hdrs import METH_ALL
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from clowder_aimage.engine.metric import new_registry
from clowder_aimage.http.route import Exchange

_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)


class RegistryMetrics:
    """Requests and their bytes; ``uploads`` returns the number of uploads in progress.

    Of ``several`` processes, each has the sums of all, by files of prometheus_client in the
    directory that PROMETHEUS_MULTIPROC_DIR names.
    """

    def __init__(self, uploads: Callable[[], float], *, several: bool = False) -> None:
        self.registry = new_registry()
        self._uploads, self._several = uploads, several
        counter = partial(Counter, registry=self.registry)
        name = "aimage_registry"
        labels = ["method", "route"]
        self._requests = counter(f"{name}_requests", "HTTP requests.", [*labels, "code"])
        self._seconds = Histogram(
            f"{name}_request_duration_seconds",
            "Time from the head of a request to the end of its response.",
            labels,
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._bytes = counter(f"{name}_bytes", "Bytes of bodies.", ["direction"])
        for direction in ("received", "sent"):
            self._bytes.labels(direction)
        text = "Uploads in progress."
        self._count = Gauge(
            # It counts those of all processes
            f"{name}_uploads",
            text,
            registry=self.registry,
            multiprocess_mode="mostrecent",
        )

    def count(self, exchange: Exchange) -> None:
        """Count a completed request."""
        method = exchange.method if exchange.method in METH_ALL else "other"
        self._requests.labels(method, exchange.route, str(exchange.status)).inc()
        self._seconds.labels(method, exchange.route).observe(exchange.seconds)
        self._bytes.labels("received").inc(exchange.received)
        self._bytes.labels("sent").inc(exchange.sent)

    def format_text(self) -> bytes:
        """Format all metrics in Prometheus' text format."""
        self._count.set(self._uploads())
        if not self._several:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

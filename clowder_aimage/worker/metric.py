"""What the worker counts, by the names that dashboards know (Prometheus, "Metric naming").

No label holds a prompt, a user or a digest: their number would grow without end.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clowder_aimage import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHORT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The counters of one worker, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        build = Gauge("aimage_build_info", "Which release this is.", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self.queue = Gauge(
            "aimage_generation_queue_depth", "Requests that wait.", registry=registry
        )
        self.refused = Counter(
            "aimage_generation_refused", "Requests refused: too many waited.", registry=registry
        )
        self.cancelled = Counter(
            "aimage_generation_cancelled", "Requests given up by who asked.", registry=registry
        )
        self.generations = Histogram(
            "aimage_generation_duration_seconds",
            "From a request's turn to its last picture.",
            ["model", "outcome"],
            buckets=_LONG,
            registry=registry,
        )
        self.steps = Histogram(
            "aimage_generation_step_seconds", "One step.", buckets=_SHORT, registry=registry
        )
        self.models = Gauge(
            "aimage_model_loaded", "Whether a model is in memory.", ["model"], registry=registry
        )
        self.loads = Histogram(
            "aimage_model_load_duration_seconds",
            "From the process's start to the model's readiness.",
            buckets=_LONG,
            registry=registry,
        )
        self.evictions = Counter(
            "aimage_model_evictions", "Models that left memory.", ["reason"], registry=registry
        )
        self.requests = Counter(
            "aimage_http_requests", "Requests answered.", ["route", "code"], registry=registry
        )
        self.pulls = Counter("aimage_pulls", "Pulls.", ["outcome"], registry=registry)
        self.pull_bytes = Counter("aimage_pull_bytes", "Bytes fetched.", registry=registry)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)

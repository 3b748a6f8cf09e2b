"""The metrics of a worker (Prometheus, "Metric naming").

No label is a prompt, a user or a digest: their number would grow without end.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clowder_aimage import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Outcomes of resolving a tag. refused: the registry answered with an error; failed: no answer
TAG_CHECKS = ("unchanged", "moved", "refused", "failed")
SOURCES = ("registry", "mirror", "neighbour", "cache")
_HOSTS = 20  # registries with a label of their own
_MODELS = 50  # and models
_SHORT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The metrics of one worker, in a registry of their own."""

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
        self.pulls = Counter("aimage_pulls", "Pulls.", ["outcome", "registry"], registry=registry)
        self.pull_failures = Counter(
            "aimage_pull_failures",
            "Pulls that failed, by the word for it in a node's status.",
            ["code", "registry"],
            registry=registry,
        )
        self.tag_checks = Counter(
            "aimage_tag_checks",
            "Questions what a tag means, of models that are here.",
            ["outcome", "registry"],
            registry=registry,
        )
        self.pull_seconds = Histogram(
            "aimage_pull_duration_seconds",
            "From a pull's turn to its end.",
            buckets=_LONG,
            registry=registry,
        )
        self.pull_bytes = Counter(
            "aimage_pull_bytes",
            "Bytes of pulls, by where they came from; cache: they were here.",
            ["source"],
            registry=registry,
        )
        for source in SOURCES:
            self.pull_bytes.labels(source)
        self.dedup = Counter(
            "aimage_blob_dedup_bytes", "Bytes that need not be fetched again.", registry=registry
        )
        self.pull_queue = Gauge(
            "aimage_pull_queue_depth", "Pulls that wait.", ["class"], registry=registry
        )
        self.pull_inflight = Gauge("aimage_pull_inflight", "Pulls at work.", registry=registry)
        self.pull_stalls = Counter(
            "aimage_pull_stalls", "Pulls that stood still for a while.", registry=registry
        )
        self.mismatches = Counter(
            "aimage_digest_mismatch", "Content that was not what it claimed to be.",
            registry=registry,
        )  # fmt: skip
        self._hosts: set[str] = set()
        self._names: set[str] = set()
        self._shown: set[str] = set()

    def host(self, name: str) -> str:
        """Return the label of a registry; "other" after the first ones."""
        if len(self._hosts) < _HOSTS:
            self._hosts.add(name)
        return name if name in self._hosts else "other"

    def tag_checked(self, registry: str, outcome: str) -> None:
        """Count a tag that was resolved; ``outcome`` is one of TAG_CHECKS.

        All outcomes exist from the first one on: a counter that starts at 1 has no increase.
        """
        host = self.host(registry)
        for each in TAG_CHECKS:
            self.tag_checks.labels(each, host)
        self.tag_checks.labels(outcome, host).inc()

    def model(self, name: str) -> str:
        """Return the label of a model; "other" after the first ones."""
        if len(self._names) < _MODELS:
            self._names.add(name)
        return name if name in self._names else "other"

    def show_models(self, loaded: Iterable[str]) -> None:
        """Show which models are in memory."""
        there = {self.model(name) for name in loaded}
        for name in self._shown | there:
            self.models.labels(name).set(name in there)
        self._shown |= there

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

"""The metrics of a worker (Prometheus, "Metric naming").

No label is a prompt, a user or a digest, as their cardinality is unbounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from clowder_aimage import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Outcomes of resolving a tag. refused: an error response of the registry; failed: no response
TAG_CHECKS = ("unchanged", "moved", "refused", "failed")
SOURCES = ("registry", "mirror", "neighbour", "cache")
# Registries with their own label
_HOSTS = 20
# Models with their own label
_MODELS = 50
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SHORT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


def new_registry() -> CollectorRegistry:
    """Return a registry with the version and with the metrics of this process and its Python."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    version = Gauge(
        "aimage_build_info",
        "The installed version.",
        ["version"],
        registry=registry,
        # One for all processes of a server
        multiprocess_mode="max",
    )
    version.labels(__version__).set(1)
    return registry


class Metrics:
    """The metrics of one worker, in a separate registry."""

    def __init__(self) -> None:
        self.registry = new_registry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)

        name = "aimage_generation"
        self.queue = gauge(f"{name}_queue_depth", "Queued requests.")
        self.refused = counter(f"{name}_refused", "Requests rejected: the queue was full.")
        self.cancelled = counter(f"{name}_cancelled", "Requests cancelled by their clients.")
        text = "Time from the start of a request to its last picture."
        labels = ["model", "outcome"]
        self.generations = histogram(f"{name}_duration_seconds", text, labels, buckets=_LONG)
        self.steps = histogram(f"{name}_step_seconds", "Time of one step.", buckets=_SHORT)
        text = "Forward passes that were computed at once, at most, for a picture."
        self.batches = histogram(f"{name}_batch_passes", text, buckets=_COUNTS)

        name = "aimage_text"
        text = "Tokens of prompts that were read and of texts that were generated."
        self.tokens = counter(f"{name}_tokens", text, ["model", "kind"])
        text = "Time from the start of a request to the first piece of its text."
        self.first_tokens = histogram(f"{name}_first_token_seconds", text, buckets=_SHORT)
        text = "Tokens per second of a text, after the first token."
        self.token_rates = histogram(f"{name}_tokens_per_second", text, buckets=_RATES)

        name = "aimage_model"
        self.models = gauge(f"{name}_loaded", "Whether a model is in memory.", ["model"])
        text = "Time to start a model process and load the model."
        self.loads = histogram(f"{name}_load_duration_seconds", text, buckets=_LONG)
        self.evictions = counter(f"{name}_evictions", "Models unloaded from memory.", ["reason"])

        self.requests = counter("aimage_http_requests", "HTTP requests.", ["route", "code"])

        name = "aimage_pull"
        self.pulls = counter(f"{name}s", "Pulls, by outcome.", ["outcome", "registry"])
        text = "Failed pulls, by error code."
        self.pull_failures = counter(f"{name}_failures", text, ["code", "registry"])
        text = "Tag checks of models in the store, by outcome."
        self.tag_checks = counter("aimage_tag_checks", text, ["outcome", "registry"])
        text = "Time from the start of a pull to its end."
        self.pull_seconds = histogram(f"{name}_duration_seconds", text, buckets=_LONG)
        text = "Bytes of pulls, by source; cache: already in the store."
        self.pull_bytes = counter(f"{name}_bytes", text, ["source"])
        for source in SOURCES:
            self.pull_bytes.labels(source)
        self.dedup = counter("aimage_blob_dedup_bytes", "Bytes of pulls already in the store.")
        self.pull_queue = gauge(f"{name}_queue_depth", "Queued pulls.", ["class"])
        self.pull_inflight = gauge(f"{name}_inflight", "Running pulls.")
        self.pull_stalls = counter(f"{name}_stalls", "Pulls that stalled.")
        self.mismatches = counter("aimage_digest_mismatch", "Content that failed verification.")
        # The label of a registry or a model; "other" once the limit is reached
        self.host = partial(_label, set(), _HOSTS)
        self.model = partial(_label, set(), _MODELS)
        self._shown: set[str] = set()

    def count_tag_check(self, registry: str, outcome: str) -> None:
        """Count a resolved tag; ``outcome`` is one of TAG_CHECKS.

        All outcomes are created together: a counter that starts at 1 shows no increase.
        """
        host = self.host(registry)
        for known_outcome in TAG_CHECKS:
            self.tag_checks.labels(known_outcome, host)
        self.tag_checks.labels(outcome, host).inc()

    def show_models(self, loaded: Iterable[str]) -> None:
        """Set the models in memory."""
        labels = {self.model(name) for name in loaded}
        for name in self._shown | labels:
            self.models.labels(name).set(name in labels)
        self._shown |= labels

    def format_text(self) -> bytes:
        """Format all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _label(labels: set[str], limit: int, name: str) -> str:
    if len(labels) < limit:
        labels.add(name)
    return name if name in labels else "other"

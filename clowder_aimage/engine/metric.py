"""The metrics of a worker (Prometheus, "Metric naming").

No label is a prompt, a user or a digest, as their cardinality is unbounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clowder_aimage import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Outcomes of resolving a tag. refused: an error response of the registry; failed: no response
TAG_CHECKS = ("unchanged", "moved", "refused", "failed")
SOURCES = ("registry", "mirror", "neighbour", "cache")
_HOSTS = 20  # registries with their own label
_MODELS = 50  # models with their own label
_SHORT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The metrics of one worker, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        gauge("aimage_build_info", "The release.", ["version"]).labels(__version__).set(1)

        name = "aimage_generation"
        self.queue = gauge(f"{name}_queue_depth", "Requests that wait.")
        self.refused = counter(f"{name}_refused", "Requests refused: too many waited.")
        self.cancelled = counter(f"{name}_cancelled", "Requests cancelled by their clients.")
        text = "From a request's turn to its last picture."
        labels = ["model", "outcome"]
        self.generations = histogram(f"{name}_duration_seconds", text, labels, buckets=_LONG)
        self.steps = histogram(f"{name}_step_seconds", "One step.", buckets=_SHORT)

        name = "aimage_model"
        self.models = gauge(f"{name}_loaded", "Whether a model is in memory.", ["model"])
        text = "From the process's start to the model's readiness."
        self.loads = histogram(f"{name}_load_duration_seconds", text, buckets=_LONG)
        self.evictions = counter(f"{name}_evictions", "Models that left memory.", ["reason"])

        self.requests = counter("aimage_http_requests", "Requests answered.", ["route", "code"])

        name = "aimage_pull"
        self.pulls = counter(f"{name}s", "Pulls.", ["outcome", "registry"])
        text = "Pulls that failed, by the code in a node's status."
        self.pull_failures = counter(f"{name}_failures", text, ["code", "registry"])
        text = "Tags resolved, of models that are in the store."
        self.tag_checks = counter("aimage_tag_checks", text, ["outcome", "registry"])
        text = "From a pull's turn to its end."
        self.pull_seconds = histogram(f"{name}_duration_seconds", text, buckets=_LONG)
        text = "Bytes of pulls, by source; cache: in the store before."
        self.pull_bytes = counter(f"{name}_bytes", text, ["source"])
        for source in SOURCES:
            self.pull_bytes.labels(source)
        self.dedup = counter("aimage_blob_dedup_bytes", "Bytes that were in the store before.")
        self.pull_queue = gauge(f"{name}_queue_depth", "Pulls that wait.", ["class"])
        self.pull_inflight = gauge(f"{name}_inflight", "Pulls that run.")
        self.pull_stalls = counter(f"{name}_stalls", "Pulls without a byte for a while.")
        self.mismatches = counter("aimage_digest_mismatch", "Content that failed verification.")
        # The label of a registry or a model; "other" once the limit is reached
        self.host = partial(_label, set(), _HOSTS)
        self.model = partial(_label, set(), _MODELS)
        self._shown: set[str] = set()

    def tag_checked(self, registry: str, outcome: str) -> None:
        """Count a resolved tag; ``outcome`` is one of TAG_CHECKS.

        All outcomes are created together: a counter that starts at 1 shows no increase.
        """
        host = self.host(registry)
        for each in TAG_CHECKS:
            self.tag_checks.labels(each, host)
        self.tag_checks.labels(outcome, host).inc()

    def show_models(self, loaded: Iterable[str]) -> None:
        """Set the models in memory."""
        there = {self.model(name) for name in loaded}
        for name in self._shown | there:
            self.models.labels(name).set(name in there)
        self._shown |= there

    def text(self) -> bytes:
        """Format all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _label(known: set[str], limit: int, name: str) -> str:
    if len(known) < limit:
        known.add(name)
    return name if name in known else "other"

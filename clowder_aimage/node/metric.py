"""The metrics of a node, in addition to those of its pulls. Dashboards depend on the names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge


class NodeMetrics:
    """The metrics of a node, in the registry of its worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, namespace="aimage", registry=registry)
        counter = partial(Counter, namespace="aimage", registry=registry)
        self.ready = gauge("ready", "Whether the node is ready.")
        self.wanted = gauge("desired_images", "Desired models.")
        self.missing = gauge("desired_missing", "Desired models that are missing or incomplete.")
        self.drifted = gauge("desired_drifted", "Desired models whose tag has moved.")
        self.failed = gauge("desired_failed", "Desired models that cannot be pulled.", ["code"])
        self.config = gauge(
            "config_last_reload_successful", "Whether the last load of the desired state succeeded."
        )
        self.config_at = gauge(
            "config_last_reload_success_timestamp_seconds", "Time of the last successful load."
        )
        self.bytes = gauge("store_bytes", "Bytes in the store.", ["kind"])
        self.free = gauge("store_free_bytes", "Free bytes of the store's file system.")
        self.size = gauge("store_size_bytes", "Bytes of the store's file system.")
        self.excess = gauge(
            "store_excess_bytes", "Bytes above the watermark that cannot be evicted."
        )
        self.images = gauge("store_images", "Names in the store.")
        self.collections = counter("gc_runs", "Garbage collections.", ["reason"])
        self.reclaimed = counter("gc_reclaimed_bytes", "Bytes freed by garbage collections.")
        self.neighbours = gauge("neighbours", "Neighbours, by state.", ["state"])
        self.exchanged = counter(
            "neighbour_bytes", "Bytes sent to and received from neighbours.", ["direction"]
        )
        self._failed_codes: set[str] = set()
        for state in ("live", "silent"):
            self.neighbours.labels(state)
        for direction in ("sent", "received"):
            self.exchanged.labels(direction)
        for kind in ("blob", "partial"):
            self.bytes.labels(kind)

    def set_failed(self, counts: Mapping[str, int]) -> None:
        """Set the number of failed models by code and remove all other codes."""
        for code in self._failed_codes - set(counts):
            self.failed.remove(code)
        for code, count in counts.items():
            self.failed.labels(code).set(count)
        self._failed_codes = set(counts)

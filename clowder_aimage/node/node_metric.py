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
        self.ready = gauge("ready", "Whether requests should be sent here.")
        self.wanted = gauge("desired_images", "Models that are to be here.")
        self.missing = gauge("desired_missing", "Wanted models that are not here in full.")
        self.drifted = gauge("desired_drifted", "Wanted models whose tag means something newer.")
        self.failed = gauge("desired_failed", "Wanted models that cannot be had.", ["code"])
        self.config = gauge(
            "config_last_reload_successful", "Whether the desired state could be read last time."
        )
        self.config_at = gauge(
            "config_last_reload_success_timestamp_seconds", "When it could be read last."
        )
        self.bytes = gauge("store_bytes", "Bytes in the store.", ["kind"])
        self.free = gauge("store_free_bytes", "Bytes free where the store is.")
        self.size = gauge("store_size_bytes", "Bytes of the file system that the store is on.")
        self.excess = gauge(
            "store_excess_bytes", "Bytes that should go, as the disk is too full, and may not."
        )
        self.images = gauge("store_images", "Names in the store.")
        self.collections = counter("gc_runs", "Collections.", ["reason"])
        self.reclaimed = counter("gc_reclaimed_bytes", "Bytes that collections have freed.")
        self.neighbours = gauge("neighbours", "Other nodes.", ["state"])
        self.exchanged = counter(
            "neighbour_bytes", "Bytes that went to neighbours, or came from them.", ["direction"]
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

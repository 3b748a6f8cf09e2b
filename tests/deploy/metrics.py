"""The metrics that rules and dashboards may use: those of nodes, workers and gateways.

Kinds and labels follow Prometheus' text format; the samples of counters and histograms have
their own names (Prometheus, "Metric types").
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.written import DEPLOY

RULES = DEPLOY / "prometheus" / "rules.yml"
RULES_TEST = DEPLOY / "prometheus" / "rules_test.yml"
DASHBOARD = DEPLOY / "grafana" / "aimage.json"
# Metrics of Prometheus itself, and labels that it and its operator add to every sample.
SYNTHETIC = frozenset({"up"})
TARGET = frozenset({"instance", "job", "namespace", "pod", "service", "node"})

_WORD = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_SELECTOR = re.compile(r"\b(aimage_\w+|up)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its kind, its labels, and whether nodes expose it.

    The others are those of workers or of gateways.
    """

    name: str
    kind: str
    labels: tuple[str, ...] = ()
    on_node: bool = True

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the names of its samples."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.name,)

    @property
    def family(self) -> str:
        """Return its name in prometheus_client."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


METRICS = (
    Metric("aimage_build_info", "gauge", ("version",)),
    Metric("aimage_ready", "gauge"),
    Metric("aimage_http_requests_total", "counter", ("route", "code")),
    # pulls
    Metric("aimage_pulls_total", "counter", ("outcome", "registry")),
    Metric("aimage_pull_failures_total", "counter", ("code", "registry")),
    Metric("aimage_tag_checks_total", "counter", ("outcome", "registry")),
    Metric("aimage_pull_duration_seconds", "histogram"),
    Metric("aimage_pull_bytes_total", "counter", ("source",)),
    Metric("aimage_pull_queue_depth", "gauge", ("class",)),
    Metric("aimage_pull_inflight", "gauge"),
    Metric("aimage_pull_stalls_total", "counter"),
    Metric("aimage_blob_dedup_bytes_total", "counter"),
    Metric("aimage_digest_mismatch_total", "counter"),
    # the store
    Metric("aimage_store_bytes", "gauge", ("kind",)),
    Metric("aimage_store_free_bytes", "gauge"),
    Metric("aimage_store_size_bytes", "gauge"),
    Metric("aimage_store_excess_bytes", "gauge"),
    Metric("aimage_store_images", "gauge"),
    Metric("aimage_gc_runs_total", "counter", ("reason",)),
    Metric("aimage_gc_reclaimed_bytes_total", "counter"),
    # the desired state
    Metric("aimage_desired_images", "gauge"),
    Metric("aimage_desired_missing", "gauge"),
    Metric("aimage_desired_drifted", "gauge"),
    Metric("aimage_desired_failed", "gauge", ("code",)),
    Metric("aimage_config_last_reload_successful", "gauge"),
    Metric("aimage_config_last_reload_success_timestamp_seconds", "gauge"),
    # peers
    Metric("aimage_neighbours", "gauge", ("state",)),
    Metric("aimage_neighbour_bytes_total", "counter", ("direction",)),
    # images
    Metric("aimage_generation_queue_depth", "gauge", on_node=False),
    Metric("aimage_generation_refused_total", "counter", on_node=False),
    Metric("aimage_generation_cancelled_total", "counter", on_node=False),
    Metric("aimage_generation_duration_seconds", "histogram", ("model", "outcome"), on_node=False),
    Metric("aimage_generation_step_seconds", "histogram", on_node=False),
    Metric("aimage_generation_batch_passes", "histogram", on_node=False),
    Metric("aimage_text_tokens_total", "counter", ("model", "kind"), on_node=False),
    Metric("aimage_text_first_token_seconds", "histogram", on_node=False),
    Metric("aimage_text_tokens_per_second", "histogram", on_node=False),
    Metric("aimage_model_loaded", "gauge", ("model",), on_node=False),
    Metric("aimage_model_load_duration_seconds", "histogram", on_node=False),
    Metric("aimage_model_evictions_total", "counter", ("reason",), on_node=False),
    # the fleet
    Metric("aimage_fleet_connected", "gauge", on_node=False),
    Metric("aimage_fleet_workers", "gauge", on_node=False),
    Metric("aimage_fleet_waiting", "gauge", on_node=False),
    Metric("aimage_fleet_queue_depth", "gauge", on_node=False),
    Metric("aimage_fleet_queue_age_seconds", "gauge", ("priority",), on_node=False),
    Metric("aimage_fleet_running", "gauge", on_node=False),
    Metric("aimage_fleet_given_up", "gauge", on_node=False),
    Metric("aimage_fleet_deliveries_total", "counter", on_node=False),
    Metric("aimage_fleet_retries_total", "counter", on_node=False),
    Metric("aimage_fleet_rejected_total", "counter", ("kind",), on_node=False),
    Metric(
        "aimage_fleet_job_duration_seconds", "histogram", ("priority", "outcome"), on_node=False
    ),
)
SAMPLES = {sample: metric for metric in METRICS for sample in metric.samples}


def names(expression: str) -> set[str]:
    """Return the samples that an expression uses."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "", expression)
    return {word for word in _WORD.findall(text) if word.startswith("aimage_") or word == "up"}


def wrong_labels(expression: str) -> set[str]:
    """Return the labels in an expression's selectors that the samples do not have."""
    found = set()
    for name, matchers in _SELECTOR.findall(expression):
        metric = SAMPLES.get(name)
        known = TARGET | {"le", *(metric.labels if metric else ())}
        asked = set(_MATCHER.findall(re.sub(r"\"[^\"]*\"", '""', matchers)))
        found |= {f"{name}{{{label}}}" for label in asked - known}
    return found


def rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(dashboard: Path = DASHBOARD) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, including those in collapsed rows."""
    found = []
    for panel in json.loads(dashboard.read_text())["panels"]:
        found.append(panel)
        found += panel.get("panels", [])
    return found


def expressions(dashboard: Path = DASHBOARD) -> dict[str, str]:
    """Return the queries of a dashboard by the panel's title and the query's letter."""
    return {
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in panels(dashboard)
        for target in panel.get("targets", [])
    }

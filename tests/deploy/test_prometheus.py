"""Alerts and the dashboard are valid for Prometheus, and use exposed metrics only."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.metrics import (
    DASHBOARD,
    METRICS,
    RULES,
    RULES_TEST,
    SAMPLES,
    SYNTHETIC,
    expressions,
    names,
    panels,
    rules,
    wrong_labels,
)
from tests.deploy.test_deploy import output
from tests.deploy.written import ROOT
from tests.docs.document import Document
from tests.process import run
from tests.program import find_program

ALERTS = [rule["alert"] for rule in rules()]
GUIDE = Document(ROOT / "docs" / "alerts.md")


def asked() -> dict[str, str]:
    """Return every expression by its location."""
    return {rule["alert"]: rule["expr"] for rule in rules()} | expressions()


def check(directory: Path, *found: str) -> subprocess.CompletedProcess[str]:
    """Run ``promtool check rules`` on expressions."""
    file = directory / "rules.json"  # JSON is valid YAML
    wanted = [{"record": f"x:{n}", "expr": expr} for n, expr in enumerate(found)]
    file.write_text(json.dumps({"groups": [{"name": "x", "rules": wanted}]}))
    command = [find_program("promtool"), "check", "rules", "--lint-fatal", str(file)]
    return run(command, text=True, timeout=120)


# -- alerts


def test_prometheus_accepts_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in output(
        find_program("promtool"), "check", "rules", "--lint-fatal", RULES
    )


def test_alerts_fire_as_expected() -> None:
    assert "SUCCESS" in output(find_program("promtool"), "test", "rules", RULES_TEST)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("expr: aimage_desired_missing > 0", "expr: aimage_desired_missing > 2"),
        ("for: 30m", "for: 45m"),
        ("< 0.10", "< 0.15"),
        (">= 2\n", ">= 1\n"),
        ('{code=~"5..", code!="503"}', '{code=~"5.."}'),
        (
            '{code=~"unreachable|registry_failed"}[30m])\n          ) >= 3',
            "[30m])\n          ) >= 3",
        ),
        (
            '{code=~"unreachable|registry_failed"}[30m])\n            ) > 0',
            "[30m])\n            ) > 0",
        ),
        (
            "(instance, registry) (\n              inc",
            "(instance, registry, code) (\n              inc",
        ),
        ('{outcome!="failed"}', '{outcome="unchanged"}'),
        ("aimage_store_excess_bytes > 0", "aimage_store_excess_bytes >= 0"),
        ("aimage_config_last_reload_successful == 0", "aimage_config_last_reload_successful == 1"),
        (
            "aimage_fleet_workers == 0 and on (instance) aimage_fleet_connected == 1",
            "aimage_fleet_workers == 0",
        ),
        (
            'aimage_fleet_queue_age_seconds{priority="interactive"}',
            "aimage_fleet_queue_age_seconds",
        ),
        ("          > 0.10\n        for: 5m", "          > 0.001\n        for: 5m"),
        ('{outcome=~"done|failed|given_up"}', '{outcome=~"failed|given_up"}'),
    ],
)
def test_the_alert_tests_detect_a_failure(before: str, after: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = RULES.read_text()
    assert text.count(before) == 1
    alert = re.findall(r"- alert: (\w+)", text.partition(before)[0])[-1]
    document = yaml.safe_load(RULES_TEST.read_text())
    document["tests"] = [  # those of all alerts take a second
        test
        for test in document["tests"]
        if alert in {case["alertname"] for case in test["alert_rule_test"]}
    ]
    (tmp_path / RULES_TEST.name).write_text(json.dumps(document))
    command = [find_program("promtool"), "test", "rules", str(tmp_path / RULES_TEST.name)]
    (tmp_path / RULES.name).write_text(text.replace(before, after))
    done = run(command, text=True)
    assert done.returncode == 1 and "FAILED" in done.stdout + done.stderr


def test_every_alert_is_tested_firing_and_silent() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    cases = [
        case
        for test in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(ALERTS)


def test_alerts_have_a_severity_and_a_description() -> None:
    for rule in rules():
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "runbook"}
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert ROOT / path == GUIDE.path
        assert anchor == rule["alert"].lower() and anchor in GUIDE.anchors
        text = GUIDE.section(rule["alert"])
        assert f"({rule['labels']['severity']})" in text
        assert len(text.split()) > 30


def test_every_documented_alert_exists() -> None:
    explained = set(re.findall(r"^### (Aimage\w+)$", GUIDE.text, re.MULTILINE))
    assert explained == set(ALERTS)


# -- the dashboard


def test_prometheus_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    found = expressions()
    assert len(found) >= 30
    done = check(tmp_path, *found.values())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(found)} rules found" in done.stdout


def test_check_refuses_an_invalid_expression(tmp_path: Path) -> None:
    assert check(tmp_path, "sum(aimage_ready)").returncode == 0
    assert check(tmp_path, "sum(aimage_ready").returncode != 0
    assert check(tmp_path, "rate(aimage_pulls_total[$__rate_interval])").returncode != 0


def test_the_dashboard_is_valid() -> None:
    document = json.loads(DASHBOARD.read_text())
    variables = {one["name"] for one in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(document["panels"])))
    assert used <= variables
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in panels()]
    assert len(titles) == len(set(titles))
    for panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["targets"] and panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


# -- names


def test_every_metric_is_exposed() -> None:
    unknown = {
        where: names(expr) - set(SAMPLES) - SYNTHETIC
        for where, expr in asked().items()
        if names(expr) - set(SAMPLES) - SYNTHETIC
    }
    assert unknown == {}
    assert all(names(expr) for expr in asked().values())


def test_every_label_belongs_to_its_metric() -> None:
    assert {w: wrong_labels(e) for w, e in asked().items() if wrong_labels(e)} == {}


def test_unknown_metrics_and_labels_are_detected() -> None:
    assert names('rate(aimage_pull_total{instance="aimage_ready"}[5m])') == {"aimage_pull_total"}
    assert "aimage_pull_total" not in SAMPLES
    assert "aimage_pull_duration_seconds" not in SAMPLES, "its samples are called otherwise"
    assert wrong_labels('aimage_pulls_total{outcome="failed", peer="x"}') == {
        "aimage_pulls_total{peer}"
    }


def test_the_dashboard_shows_every_metric() -> None:
    shown = {SAMPLES[name] for expr in expressions().values() for name in names(expr)}
    assert [metric.name for metric in METRICS if metric not in shown] == []


def test_counters_are_used_with_rate_or_increase() -> None:
    """A counter is reset at each restart, which only rate() and increase() handle."""
    for where, expr in asked().items():
        for name in names(expr):
            if name in SAMPLES and SAMPLES[name].kind != "gauge":
                bare = re.findall(rf"(?<!\w){name}(?:\{{[^}}]*\}})?(\[\w+\])?", expr)
                assert all(bare), f"{where}: {name}"
            elif name in SAMPLES:
                assert not re.search(rf"(rate|increase)\({name}\b", expr), f"{where}: {name}"


def test_every_metric_of_a_worker_and_a_gateway_is_in_the_table() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from clowder_aimage.engine.metric import Metrics
    from clowder_aimage.fleet.gateway.metric import GatewayMetrics

    declared = {
        family.name: family.type
        for metrics in (Metrics(), GatewayMetrics())
        for family in metrics.registry.collect()
        if family.name.startswith("aimage_")  # the others are those of every Python process
    }
    table = {metric.family: metric.kind for metric in METRICS}
    assert {name: kind for name, kind in declared.items() if table.get(name) != kind} == {}

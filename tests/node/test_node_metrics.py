"""Metrics of a live node match those that rules and dashboards use."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import pytest

from tests.deploy.metrics import METRICS
from tests.node.node_run import LiveNode, LocalNode
from tests.process import run
from tests.program import find_program
from tests.worker.conftest import begin


def exposed(url: str) -> tuple[Any, dict[Any, Any]]:
    """Return the text of /metrics, and the types of its families except those of the process."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    ours = (name for name in found if name.startswith("aimage_") and not name.endswith("_created"))
    return text, {name: found[name] for name in ours}


@pytest.mark.integration  # promtool
def test_a_node_exposes_every_metric_of_nodes(node: LocalNode) -> None:
    node.start()
    text, found = exposed(node.url)
    wanted = {one.name: one.kind for one in METRICS if one.on_node}
    assert wanted.items() <= found.items(), wanted.items() - found.items()
    command = [find_program("promtool"), "check", "metrics"]
    done = run(command, input=text, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.integration
def test_a_worker_with_a_node_exposes_exactly_the_known_metrics(live_node: LiveNode) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    live_node.want({"ref": "127.0.0.1:1/none:v1"})
    live_node.worker = begin(live_node.aimage, "--node", "--desired", live_node.desired)
    assert live_node.status()["models"][0]["ref"] == "127.0.0.1:1/none:v1"
    _, found = exposed(live_node.url)
    ours = [one for one in METRICS if not one.name.startswith("aimage_fleet_")]  # of gateways
    assert {one.name: one.kind for one in ours} == found

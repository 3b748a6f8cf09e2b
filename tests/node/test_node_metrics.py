"""Metrics of a live node match those that rules and dashboards use."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import pytest

from tests.deploy.metrics import METRICS
from tests.deploy.test_deploy import tool
from tests.node.conftest import LiveNode
from tests.process import run
from tests.worker.conftest import begin

pytestmark = pytest.mark.integration  # nodes in child processes


def exposed(url: str) -> tuple[Any, dict[Any, Any]]:
    """Return the text of /metrics, and the types of its families except those of the process."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    ours = (name for name in found if name.startswith("aimage_") and not name.endswith("_created"))
    return text, {name: found[name] for name in ours}


def test_a_node_exposes_every_metric_of_nodes(node: LiveNode) -> None:
    node.start()
    text, found = exposed(node.url)
    wanted = {one.name: one.kind for one in METRICS if one.on_node}
    assert wanted.items() <= found.items(), wanted.items() - found.items()
    command = [tool("promtool"), "check", "metrics"]
    done = run(command, input=text, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_with_a_node_exposes_exactly_the_known_metrics(node: LiveNode) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    node.want({"ref": "127.0.0.1:1/none:v1"})
    node.worker = begin(node.aimage, "--node", "--desired", node.desired)
    assert node.status()["models"][0]["ref"] == "127.0.0.1:1/none:v1"
    _, found = exposed(node.url)
    ours = [one for one in METRICS if not one.name.startswith("aimage_fleet_")]  # of gateways
    assert {one.name: one.kind for one in ours} == found

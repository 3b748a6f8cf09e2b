"""The chart in deploy/helm: its values, and what helm renders where it is installed."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clowder_aimage import __version__
from tests.deploy.cluster import complaints, is_selected, listens_on, of_kind, parsed, pods
from tests.deploy.crd import SERVICE_MONITOR
from tests.deploy.test_deploy import check_arguments
from tests.deploy.test_kubernetes import VERSIONS, validate
from tests.deploy.written import DEPLOY
from tests.process import run

CHART = DEPLOY / "helm" / "aimage"
TEMPLATES = sorted((CHART / "templates").iterdir())
(VALUES,) = parsed((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ALL = {
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "registry": {"enabled": True, "upstream": "registry.example"},
    "node": {"desired": [{"ref": "registry.example/team/model:v1", "pin": True}]},
    "worker": {"replicas": None, "extraArgs": ["--deadline=1m"]},
}


def leaves(value: Any, path: str = "") -> set[str]:
    """Return the paths of the values; an object whose keys are free is one value."""
    if not isinstance(value, dict) or not value or path.endswith((".resources", ".nodeSelector")):
        return {path}
    return {leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}")}


def helm(*arguments: object) -> str:
    program = shutil.which("helm") or pytest.skip("helm is not installed")
    done = run([program, *arguments], text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(params=[{}, ALL], ids=["default", "all"])
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "values.yaml").write_text(json.dumps(request.param))
    text = helm("template", "x", CHART, "--namespace", "n", "-f", tmp_path / "values.yaml")
    (tmp_path / "rendered.yaml").write_text(text)
    for version in VERSIONS:
        done = validate(version, tmp_path / "rendered.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
    return parsed(text)


def test_the_chart_has_the_version_of_the_package() -> None:
    (chart,) = parsed((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_the_values_match_their_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    for path, wrong in (
        (("wroker",), {}),
        (("worker", "replicas"), "two"),
        (("node", "desired"), [{"rfe": "x"}]),
        (("store", "path"), "relative"),
        (("metrics", "serviceMonitor", "interval"), "1s"),
    ):
        values: Any = copy.deepcopy(VALUES)
        place = values
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values, SCHEMA)


def test_templates_use_exactly_the_values_that_exist() -> None:
    text = "\n".join(path.read_text() for path in TEMPLATES)
    used = set(re.findall(r"\.Values((?:\.[A-Za-z]+)+)", text))
    assert used == leaves(VALUES)


def test_every_value_is_in_the_schema() -> None:
    def properties(schema: Any, path: str = "") -> set[str]:
        inner = schema.get("properties")
        if inner is None:
            return {path}
        return {leaf for key, one in inner.items() for leaf in properties(one, f"{path}.{key}")}

    assert properties(SCHEMA) - {".global"} == leaves(VALUES)


def test_helm_accepts_the_chart() -> None:
    assert "ERROR" not in helm("lint", "--strict", CHART)


def test_rendered_pods_are_as_restricted_as_those_of_the_kustomizations(
    rendered: list[dict[str, Any]],
) -> None:
    found = pods(rendered)
    assert {pod.name for pod in found} >= {"x-node", "x-worker"}
    assert [(pod.name, complaints(pod)) for pod in found if complaints(pod)] == []


def test_rendered_services_and_policies_select_pods_and_ports(
    rendered: list[dict[str, Any]],
) -> None:
    found = pods(rendered)
    for service in of_kind("Service", rendered):
        (pod,) = [pod for pod in found if is_selected(pod, service["spec"]["selector"])]
        ports = {port["name"]: port["containerPort"] for c in pod.containers for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
        assert ports["http"] == listens_on(pod.containers[0])
    policies = of_kind("NetworkPolicy", rendered)
    for pod in found:
        (policy,) = [
            one for one in policies if is_selected(pod, one["spec"]["podSelector"]["matchLabels"])
        ]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_monitors_are_optional_and_select_the_services(
    rendered: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    found = of_kind("ServiceMonitor", rendered)
    names = {"x-node", "x-worker", "x-registry"} if "all" in request.node.name else set()
    assert {monitor["metadata"]["name"] for monitor in found} == names
    for monitor in found:
        jsonschema.validate(monitor, SERVICE_MONITOR)
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        services = of_kind("Service", rendered)
        (service,) = [one for one in services if labels <= one["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_the_program_accepts_the_rendered_commands(rendered: list[dict[str, Any]]) -> None:
    for pod in pods(rendered):
        check_arguments(pod.name, pod.containers[0]["args"])

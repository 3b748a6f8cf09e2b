"""The manifests in deploy/kubernetes are valid, consistent, and sufficient for their pods."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.fleet.name import INTERACTIVE, FleetNames
from tests.deploy import crd
from tests.deploy.cluster import (
    GUIDE,
    KUBERNETES,
    KUSTOMIZATIONS,
    OVERLAYS,
    SECRETS,
    built,
    files,
    generated_from,
    is_selected,
    kubectl,
    kustomization,
    listens_on,
    manifests,
    of_kind,
    parsed,
    pods,
)
from tests.deploy.metrics import SAMPLES, names, wrong_labels
from tests.docs.document import Document
from tests.process import run
from tests.program import lack

# Image volumes are enabled by default from 1.35; our manifests need no more than 1.33, and
# the newest version of the validator shows removed fields.
VERSIONS = ("1.33", "1.37")


def build(overlay: Path) -> list[dict[str, Any]]:
    return parsed(built(overlay, kubectl()))


def validate(version: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """Run ``kubernetes-validate --strict``; without it, as ``lack``."""
    if importlib.util.find_spec("kubernetes_validate") is None:
        lack("kubernetes-validate is not installed")
    command = [
        sys.executable,
        "-m",
        "kubernetes_validate",
        "--strict",
        "-k",
        version,
        *map(str, files),
    ]
    return run(command, text=True, timeout=120)


# -- kustomize


def test_files_of_a_kustomization_exist() -> None:
    for path in KUSTOMIZATIONS:
        found = kustomization(path)
        for entry in (*found.get("resources", ()), *found.get("components", ())):
            target = path.parent / entry
            assert target.is_file() or (target / "kustomization.yaml").is_file(), entry
        for entry in found.get("components", ()):
            assert kustomization(path.parent / entry / "kustomization.yaml")["kind"] == "Component"
        for file in generated_from(path):
            assert file.is_file(), file
        assert "patchesStrategicMerge" not in found
        assert all(patch.keys() == {"patch"} for patch in found.get("patches", ())), "inline only"


def test_every_manifest_is_in_a_kustomization() -> None:
    listed = {
        (path.parent / entry).resolve()
        for path in KUSTOMIZATIONS
        for entry in (
            *kustomization(path).get("resources", ()),
            *kustomization(path).get("components", ()),
        )
    }
    examples = {file for name in ("examples", "kserve") for file in (KUBERNETES / name).iterdir()}
    assert {file.resolve() for file in files()} - examples == {p for p in listed if p.is_file()}
    assert {p.parent for p in KUSTOMIZATIONS} - set(OVERLAYS) <= listed


def test_kustomize_builds_an_overlay() -> None:
    for overlay in OVERLAYS:
        found = build(overlay)
        assert {"Namespace", "DaemonSet", "ServiceAccount", "NetworkPolicy"} <= {
            one["kind"] for one in found
        }
        keys = [(one["kind"], one["metadata"]["name"]) for one in found]
        assert len(keys) == len(set(keys))
        namespaced = [one for one in found if one["kind"] != "Namespace"]
        assert {one["metadata"].get("namespace") for one in namespaced} == {"aimage"}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_kubernetes_schemas(version: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{overlay.name}.yaml" for overlay in OVERLAYS]
    for overlay, file in zip(OVERLAYS, files, strict=True):
        file.write_text(built(overlay, kubectl()))
    files += (KUBERNETES / "examples").iterdir()
    done = validate(version, *files)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    for file in files:
        least = 8 if file.parent == tmp_path else 1
        assert text.count(f"{file} passed for resource") >= least, text
    unknown = set(re.findall(r"Couldn't find schema for kind (\w+)", text))
    assert unknown <= set(crd.SCHEMAS), text


def test_the_validator_refuses_a_wrong_key(tmp_path: Path) -> None:
    wrong = tmp_path / "daemonset.yaml"
    text = (KUBERNETES / "node" / "daemonset.yaml").read_text()
    wrong.write_text(text.replace("readOnlyRootFilesystem:", "readOnlyRootFileSystem:"))
    assert validate(VERSIONS[-1], wrong).returncode != 0


def test_custom_resources_match_their_definitions() -> None:
    found = [one for one in manifests() if one["kind"] in crd.SCHEMAS]
    assert {one["kind"] for one in found} == set(crd.SCHEMAS)
    patched = [one for overlay in OVERLAYS for one in build(overlay) if one["kind"] in crd.SCHEMAS]
    for one in (*found, *patched):
        assert crd.faults(one) == [], one["metadata"]["name"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("ScaledObject", lambda spec: spec.update(minReplicas=1)),
        ("ScaledObject", lambda spec: spec["triggers"][0]["metadata"].update(threshold=2)),
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(interval=30)),
        ("ServiceMonitor", lambda spec: spec.pop("selector")),
        ("ClusterStorageContainer", lambda spec: spec.pop("supportedUriFormats")),
        ("InferenceService", lambda spec: spec["predictor"]["model"].update(uri="x")),
    ],
)
def test_the_definitions_refuse_invalid_resources(kind: str, change: Any) -> None:
    wrong = copy.deepcopy(of_kind(kind)[0])
    change(wrong["spec"])
    assert crd.faults(wrong) != []


# -- references between manifests


def test_services_select_pods() -> None:
    for service in of_kind("Service"):
        (pod,) = [pod for pod in pods(manifests()) if is_selected(pod, service["spec"]["selector"])]
        ports = {port["name"] for c in pod.containers for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_peers_use_the_headless_service_name() -> None:
    (daemon,) = pods(of_kind("DaemonSet"))
    (container,) = daemon.containers
    (neighbour,) = [a for a in container["args"] if a.startswith("--neighbour=")]
    kind, host, port = neighbour.partition("=")[2].split(":")
    (service,) = [s for s in of_kind("Service") if s["metadata"]["name"] == host]
    assert kind == "dns"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert is_selected(daemon, service["spec"]["selector"])
    assert int(port) == service["spec"]["ports"][0]["port"] == listens_on(container)


def test_monitors_select_services_and_ports() -> None:
    for monitor in of_kind("ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [
            s for s in of_kind("Service") if labels.items() <= s["metadata"]["labels"].items()
        ]
        ports = {port["name"] for port in service["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["port"] in ports
            assert endpoint["authorization"]["credentials"]["name"] in SECRETS


def test_workers_have_one_autoscaler() -> None:
    for overlay in OVERLAYS:
        found = build(overlay)
        scalers = of_kind("HorizontalPodAutoscaler", found) + of_kind("ScaledObject", found)
        workers = {one["metadata"]["name"]: one for one in of_kind("Deployment", found)}
        assert len(scalers) == len(workers)
        for scaler in scalers:
            target = scaler["spec"]["scaleTargetRef"]
            assert target["kind"] == "Deployment"
            worker = workers.pop(target["name"])
            assert "replicas" not in worker["spec"], "applying it again would undo the autoscaler"
            spec = scaler["spec"]
            least = spec.get("minReplicas", spec.get("minReplicaCount"))
            assert 1 <= least < spec.get("maxReplicas", spec.get("maxReplicaCount"))


def test_workers_of_one_overlay_have_a_gpu() -> None:
    for overlay in OVERLAYS:
        for worker in of_kind("Deployment", build(overlay)):
            if worker["metadata"]["name"] != "aimage-worker":
                continue
            spec = worker["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            is_cuda = overlay.name == "nvidia"
            assert (container["resources"]["limits"].get("nvidia.com/gpu") == 1) == is_cuda
            assert ("-cuda:" in container["image"]) == is_cuda
            labels = {"kubernetes.io/os": "linux", "aimage/store": "true"}
            more = {"nvidia.com/gpu.present": "true"} if is_cuda else {}
            assert spec["nodeSelector"] == labels | more
            rolling = worker["spec"]["strategy"]["rollingUpdate"]
            assert (rolling["maxSurge"] == 0) == is_cuda


def test_autoscalers_use_the_queue_length() -> None:
    (own,) = [one for one in of_kind("HorizontalPodAutoscaler") if targets(one) == "aimage-worker"]
    (metric,) = own["spec"]["metrics"]
    (keda,) = of_kind("ScaledObject")
    (trigger,) = keda["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    queue = "aimage_generation_queue_depth"
    assert metric["pods"]["metric"]["name"] == queue and names(query) == {queue}
    assert queue in SAMPLES and wrong_labels(query) == set()
    values = (metric["pods"]["target"]["averageValue"], trigger["metadata"]["threshold"])
    assert len(set(values)) == 1, "both mean the same"


def targets(scaler: dict[str, Any]) -> str:
    return str(scaler["spec"]["scaleTargetRef"]["name"])


def test_the_workers_of_a_fleet_are_scaled_by_its_queue() -> None:
    (overlay,) = [path for path in OVERLAYS if path.name == "fleet"]
    found = build(overlay)
    (keda,) = of_kind("ScaledObject", found)
    (trigger,) = keda["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert names(query) == {"aimage_fleet_queue_depth", "aimage_fleet_waiting"}
    assert names(query) <= set(SAMPLES) and wrong_labels(query) == set()
    workers = {pod.name: pod for pod in pods(of_kind("Deployment", found))}
    variables = {
        owner: {entry["name"]: entry for entry in pod.containers[0]["env"]}
        for owner, pod in workers.items()
    }
    (nats,) = [one for one in of_kind("Service", found) if one["metadata"]["name"] == "aimage-nats"]
    (port,) = nats["spec"]["ports"]
    place = f"@aimage-nats:{port['port']}"
    assert variables["aimage-worker"]["AIMAGE_SERVE_JOIN"]["value"].endswith(place)
    assert variables["aimage-gateway"]["AIMAGE_NATS"]["value"].endswith(place)
    assert variables["aimage-worker"]["AIMAGE_SERVE_WORKER_NAME"]["valueFrom"]  # each its own
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("NetworkPolicy", found)}
    for one in ("aimage-worker", "aimage-gateway", "aimage-fleet-init"):
        (ports,) = [
            rule["ports"] for rule in policies[one]["egress"] if "podSelector" in rule["to"][0]
        ]
        assert ports == [{"port": "nats"}]
    assert policies["aimage-nats"]["egress"] == []


def test_the_cluster_has_the_shipped_configuration_of_nats() -> None:
    """``tests/fleet/test_role_matrix.py`` compares its users."""
    shipped = KUBERNETES / "fleet" / "nats-server.conf"
    asked = set(re.findall(r"\$(NATS_\w+)", shipped.read_text()))
    (pod,) = pods(of_kind("StatefulSet"))
    assert {entry["name"] for entry in pod.containers[0]["env"]} == asked


def test_the_guide_scales_by_the_queue_of_one_model() -> None:
    (block,) = [b for b in Document(GUIDE).blocks if "nats-jetstream" in b.text]
    (one,) = parsed(block.text)
    assert crd.faults(one) == []
    (trigger,) = one["spec"]["triggers"]
    digest = "0123456789abcdef" * 4
    facts, names_of = trigger["metadata"], FleetNames()
    assert facts["stream"] == names_of.jobs
    assert facts["consumer"] == names_of.build_consumer_name(INTERACTIVE, digest)


def test_disruption_budgets_allow_a_drain() -> None:
    budgets = of_kind("PodDisruptionBudget")
    workers = pods(of_kind("Deployment"))
    assert len(budgets) == len(workers) == 2
    for budget in budgets:
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [pod.name for pod in workers if is_selected(pod, selector)] == [
            budget["metadata"]["name"]
        ]
        assert budget["spec"]["maxUnavailable"] >= 1 and "minAvailable" not in budget["spec"]


def test_network_policies_deny_by_default() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("NetworkPolicy")}
    nothing = policies.pop("aimage-nothing")
    assert nothing == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for pod in pods(manifests()):
        if pod.kind == "Pod":
            continue
        (spec,) = [
            spec
            for spec in policies.values()
            if is_selected(pod, spec["podSelector"]["matchLabels"])
        ]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])
        assert all(rule["to"] and rule["ports"] for rule in spec["egress"])
        named = {p["name"] for c in pod.containers for p in c.get("ports", ())}
        asked = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
        assert asked <= named


def test_pods_cannot_reach_cloud_metadata() -> None:
    blocks = [
        peer["ipBlock"]
        for one in of_kind("NetworkPolicy")
        for rule in one["spec"].get("egress", ())
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    assert blocks
    for block in blocks:
        reserved = "169.254.0.0/16" if "." in block["cidr"] else "fd00:ec2::254/128"
        assert reserved in block["except"]


def test_the_guide_names_the_validated_versions() -> None:
    guide = " ".join(GUIDE.read_text().split())
    assert "against the schemas of Kubernetes {} and {} with".format(*VERSIONS) in guide

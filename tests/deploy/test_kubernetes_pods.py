"""Pods in deploy/kubernetes are hardened, and their command lines are valid."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from clowder_aimage import __version__
from clowder_aimage.document import schema
from clowder_aimage.oci import Reference
from tests.deploy.cluster import (
    GUIDE,
    KUBERNETES,
    KUSTOMIZATIONS,
    OVERLAYS,
    SECRETS,
    built,
    called,
    complaints,
    generated_from,
    kubectl,
    kustomization,
    listens_on,
    manifests,
    name,
    of_kind,
    own_pods,
    parsed,
    pods,
    read,
)
from tests.deploy.test_deploy import check_arguments
from tests.deploy.written import ROOT
from tests.docs.document import Document
from tests.process import Aimage

IMAGE = f"registry.example.com/clowder-aimage:{__version__}"


def build(overlay: Path) -> list[dict[str, Any]]:
    return parsed(built(overlay, kubectl()))


# -- permissions


def test_pods_are_hardened() -> None:
    for pod in pods(manifests()):
        assert complaints(pod) == []


def test_pods_are_found() -> None:
    assert {called(pod) for pod in pods(manifests())} == {
        "DaemonSet/aimage-node",
        "Deployment/aimage-gateway",
        "Deployment/aimage-worker",
        "Job/aimage-fleet-init",
        "StatefulSet/aimage-nats",
        "Pod/aimage-volume",
    }


WRONG: list[tuple[tuple[Any, ...], object]] = [
    (("securityContext", "runAsNonRoot"), False),
    (("securityContext", "runAsUser"), 0),
    (("securityContext", "runAsGroup"), 0),
    (("securityContext", "seccompProfile"), {"type": "Unconfined"}),
    (("hostNetwork",), True),
    (("automountServiceAccountToken",), True),
    (("enableServiceLinks",), True),
    (("containers", 0, "securityContext", "readOnlyRootFilesystem"), False),
    (("containers", 0, "securityContext", "allowPrivilegeEscalation"), True),
    (("containers", 0, "securityContext", "privileged"), True),
    (("containers", 0, "securityContext", "capabilities"), {"drop": ["NET_RAW"]}),
    (("containers", 0, "securityContext", "capabilities", "add"), ["SYS_ADMIN"]),
    (("containers", 0, "securityContext", "runAsUser"), 0),
    (("containers", 0, "resources", "limits"), {}),
]


def test_complaints_reports_insecure_pods() -> None:
    for path, value in WRONG:
        daemon = copy.deepcopy(of_kind("DaemonSet")[0])
        (pod,) = pods([daemon])
        where: Any = pod.spec
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value
        assert complaints(pod) != [], path


def test_complaints_includes_init_containers() -> None:
    daemon = copy.deepcopy(of_kind("DaemonSet")[0])
    (pod,) = pods([daemon])
    pod.spec["initContainers"] = [{"name": "chown", "securityContext": {"runAsUser": 0}}]
    assert any(complaint.startswith("chown: may be root") for complaint in complaints(pod))


def test_images_are_of_this_release() -> None:
    for pod in pods(manifests()):
        for container in pod.containers:
            assert container["image"] == IMAGE or pod.name == "aimage-nats"


def test_overlays_use_this_release() -> None:
    for overlay in OVERLAYS:
        image, *others = kustomization(overlay / "kustomization.yaml")["images"]
        assert f"{image['name']}:{image['newTag']}" == IMAGE
        assert [one["name"] for one in others] in ([], [f"{image['name']}-cuda"])
        assert {one["newTag"] for one in others} <= {image["newTag"]}


def test_no_account_has_permissions() -> None:
    """There is no role and no binding; the account's token is not mounted."""
    assert not {one["kind"] for one in manifests()} & {
        "Role",
        "ClusterRole",
        "RoleBinding",
        "ClusterRoleBinding",
    }
    (account,) = of_kind("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    running = [pod for pod in pods(manifests()) if pod.kind != "Pod"]
    assert {pod.spec["serviceAccountName"] for pod in running} == {account["metadata"]["name"]}


def test_the_store_is_the_only_host_path() -> None:
    """The node's operator creates it: directories that the kubelet creates belong to root."""
    found = {
        (volume["name"], volume["hostPath"]["path"], volume["hostPath"]["type"])
        for pod in pods(manifests())
        for volume in pod.spec["volumes"]
        if "hostPath" in volume
    }
    assert found == {("store", "/var/lib/aimage", "Directory")}
    (owner,) = re.findall(r"install -d -o (\d+) -g (\d+) .*/var/lib/aimage", GUIDE.read_text())
    contexts = [p.spec["securityContext"] for p in pods(manifests()) if p.kind != "Pod"]
    assert {(str(c["runAsUser"]), str(c["runAsGroup"])) for c in contexts} == {owner}


def test_mounted_volumes_exist() -> None:
    for pod in pods(manifests()):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = [mount for container in pod.containers for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert not [mount for mount in mounts if "subPath" in mount], "it would never be updated"
        writable = {mount["name"] for mount in mounts if not mount.get("readOnly")}
        assert writable <= {"store", "tmp", "jetstream"}
        generated = {
            generator["name"]
            for path in KUSTOMIZATIONS
            for generator in kustomization(path).get("configMapGenerator", ())
        }
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in generated
            if "secret" in volume:
                assert volume["secret"]["secretName"] in SECRETS
                assert volume["secret"]["defaultMode"] & 0o007 == 0
            if "emptyDir" in volume:
                assert "sizeLimit" in volume["emptyDir"], "a pod could fill its node"


def test_secrets_are_referenced_and_not_included() -> None:
    assert of_kind("Secret") == []
    guide = GUIDE.read_text()
    for secret in SECRETS:
        assert re.search(rf"create secret \S+(?: \S+)* {secret}\b", guide), secret
    for path in KUBERNETES.rglob("*"):
        if path.is_file():
            assert "secretGenerator" not in path.read_text(), path


def test_probes_use_endpoints_without_a_token() -> None:
    for pod in [p for p in own_pods(manifests()) if p.kind != "Job"]:
        pytest.importorskip("aiohttp", reason="aiohttp is not installed")
        from clowder_aimage.api import health
        from clowder_aimage.http.route import OPEN

        routes = health.build_routes(Mock())
        is_open = {route.path for route in routes if route.scope == OPEN}
        (container,) = pod.containers
        probes = {
            kind: container[f"{kind}Probe"]["httpGet"]
            for kind in ("startup", "liveness", "readiness")
        }
        assert {kind: probe["path"] for kind, probe in probes.items()} == {
            "startup": "/healthz",
            "liveness": "/healthz",
            "readiness": "/readyz",
        }
        assert {probe["path"] for probe in probes.values()} <= is_open
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {ports[probe["port"]] for probe in probes.values()} == {listens_on(container)}
        monitored = {
            e["path"] for one in of_kind("ServiceMonitor") for e in one["spec"]["endpoints"]
        }
        assert monitored <= {route.path for route in routes}


# -- command lines


def test_every_option_is_accepted_by_the_program() -> None:
    for pod in own_pods(manifests()):
        (container,) = pod.containers
        check_arguments(called(pod), container["args"])


def test_the_worker_accepts_every_value() -> None:
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    from clowder_aimage.cli.console.fleet_access import ACCESS_OPTIONS
    from clowder_aimage.cli.verbs.gateway import gateway as gateway_verb
    from clowder_aimage.cli.verbs.serve import serve
    from clowder_aimage.engine.settings import Settings, gather
    from clowder_aimage.fleet.gateway.settings import GatewaySettings

    gateway, worker = sorted(pods(of_kind("Deployment")), key=called)
    options = gateway_verb.make_context("gateway", gateway.containers[0]["args"][1:]).params
    known = {name: value for name, value in options.items() if name not in ACCESS_OPTIONS}
    config, _ = gather(GatewaySettings, known, None)
    assert gateway.spec["terminationGracePeriodSeconds"] >= config.grace + 10
    assert config.token_file is not None
    options = serve.make_context("serve", worker.containers[0]["args"][1:]).params
    said, _ = gather(Settings, {**options, "aliases": ",".join(options["aliases"])}, None)
    assert worker.spec["terminationGracePeriodSeconds"] >= said.grace + 10
    assert said.token_file is not None, "it listens on every address"


def test_paths_on_command_lines_are_mounted() -> None:
    for pod in pods(manifests()):
        for container in pod.containers:
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            values = [a.partition("=")[2] for a in container.get("args", ())]
            values += [entry.get("value", "") for entry in container.get("env", ())]
            for value in values:
                if value.startswith("/"):
                    assert any(value == m or value.startswith(f"{m}/") for m in mounted), value


# -- the desired state and the configuration


def lists() -> list[Path]:
    return sorted({f for p in KUSTOMIZATIONS for f in generated_from(p) if f.suffix == ".yaml"})


@pytest.mark.parametrize("file", lists(), ids=name)
def test_a_node_can_parse_its_desired_state(file: Path, tmp_path: Path) -> None:
    from clowder_aimage.node.spec_files import read_directory

    (tmp_path / file.name).write_text(file.read_text())
    desired = read_directory(tmp_path)
    assert len(desired.files) == 1
    if file.parent in OVERLAYS:
        assert desired.specs


def test_the_list_in_the_guide_is_valid(tmp_path: Path) -> None:
    from clowder_aimage.node.spec_files import read_directory

    (block,) = [b for b in Document(GUIDE).blocks if b.text.startswith("- ref:")]
    (tmp_path / "models.yaml").write_text(block.text)
    first, second = sorted(read_directory(tmp_path).specs, key=lambda want: -want.priority)
    assert (first.pin, first.policy, first.refresh) == (True, "always", 300.0)
    assert second.components == ("vae",) and second.digest is not None


def test_the_example_list_in_the_base_is_valid(tmp_path: Path) -> None:
    from clowder_aimage.node.spec_files import read_directory

    text = (KUBERNETES / "node" / "desired" / "models.yaml").read_text()
    lines = [line[2:] for line in text.splitlines() if re.match(r"# (- |  )", line)]
    (tmp_path / "models.yaml").write_text("\n".join(lines))
    (want,) = read_directory(tmp_path).specs
    assert want.pin and want.refresh == 300.0


def test_a_new_list_of_models_restarts_no_pod() -> None:
    for overlay in OVERLAYS:
        """The list keeps its name, and the daemon sees the file change; the configuration, which is
        read once, gets a name of its own for each content, and pods are replaced."""
        found = build(overlay)
        maps = {one["metadata"]["name"]: one["data"] for one in of_kind("ConfigMap", found)}
        assert "aimage-desired" in maps
        (configuration,) = [key for key in maps if re.fullmatch(r"aimage-config-\w{10}", key)]
        (daemon,) = pods(of_kind("DaemonSet", found))
        used = {v["configMap"]["name"] for v in daemon.spec["volumes"] if "configMap" in v}
        assert used == {"aimage-desired", configuration}
        schema.validate("config", json.loads(maps[configuration]["config.json"]))


# -- image volumes


def test_the_example_mounts_only_a_model() -> None:
    (example,) = read(KUBERNETES / "examples" / "image-volume.yaml")
    (pod,) = pods([example])
    (volume,) = pod.spec["volumes"]
    reference = Reference.parse(volume["image"]["reference"])
    assert reference.registry is not None and reference.tag not in (None, "latest")
    (mount,) = pod.containers[0]["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": "/model", "readOnly": True}


@pytest.mark.parametrize(
    ("dialect", "annotation"),
    [("clowder", "vnd.clowder.aimage.name"), ("modelpack", "org.cncf.model.filepath")],
)
def test_layer_names_match_the_guide(dialect: str, annotation: str, tmp_path: Path) -> None:
    """Runtimes look for a title (CRI-O, internal/ociartifact/store.go).

    The guide lists those that find none, and must change once layers have titles.
    """
    store = tmp_path / "store"
    make = ("create", "-q", "tiny", ROOT / "examples" / "tiny", "--dialect", dialect)
    digest = Aimage(tmp_path, store)(*make).line.removeprefix("sha256:")
    layers = json.loads((store / "blobs" / "sha256" / digest).read_bytes())["layers"]
    assert layers and all(annotation in layer["annotations"] for layer in layers)
    assert not [one for one in layers if "org.opencontainers.image.title" in one["annotations"]]
    assert f"`{annotation}`" in GUIDE.read_text()

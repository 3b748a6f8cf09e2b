"""The manifests of deploy/kubernetes, as files and as built by kustomize."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.written import DEPLOY, ROOT
from tests.process import run

KUBERNETES = DEPLOY / "kubernetes"
GUIDE = ROOT / "docs" / "kubernetes.md"
OVERLAYS = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
# Absent from the files: created by whoever applies them (docs/kubernetes.md).
SECRETS = frozenset(
    {"aimage-node", "aimage-worker", "aimage-metrics", "aimage-registry", "aimage-nats"}
    | {"aimage-fleet-keys"}
)

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """The specification of a pod, whatever its owner."""

    name: str
    kind: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


@cache
def read(path: Path) -> tuple[Manifest, ...]:
    """Return the documents of a file. They must not be changed."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return tuple(found for found in yaml.safe_load_all(path.read_text()) if found)


def kustomization(path: Path) -> Manifest:
    (found,) = read(path)
    return found


def files() -> list[Path]:
    """Return every file with manifests: no kustomization, no list of models."""
    told = {file for path in KUSTOMIZATIONS for file in generated_from(path)}
    every = set(KUBERNETES.rglob("*.yaml")) - set(KUSTOMIZATIONS) - told
    return sorted(every)


def generated_from(path: Path) -> Iterator[Path]:
    """Return the files that a kustomization puts into ConfigMaps."""
    for generator in kustomization(path).get("configMapGenerator", ()):
        for file in generator["files"]:
            yield path.parent / file.rpartition("=")[2]


def manifests() -> list[Manifest]:
    return [manifest for path in files() for manifest in read(path)]


@cache
def built(overlay: Path, program: str) -> str:
    """Return the output of ``kubectl kustomize`` for an overlay; fail the test with its errors."""
    command = [program, "kustomize", str(overlay)]
    environment = {**os.environ, "KUBECONFIG": os.devnull}
    done = run(command, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kubectl() -> str:
    """Return the path of kubectl, which many machines lack: distributions' versions are too old."""
    return shutil.which("kubectl") or pytest.skip("there is no kubectl")


def parsed(text: str) -> list[Manifest]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return [found for found in yaml.safe_load_all(text) if found]


def pods(among: list[Manifest]) -> list[Pod]:
    """Return every pod specification, at any depth."""
    found = []
    for manifest in among:
        for owner in _owners(manifest):
            metadata = owner.get("metadata", {})
            labels = metadata.get("labels", {})
            found.append(Pod(manifest["metadata"]["name"], manifest["kind"], labels, owner["spec"]))
    return found


def _owners(value: object) -> Iterator[dict[str, Any]]:
    """Return the objects whose ``spec`` has containers."""
    if isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield value
        for inner in value.values():
            yield from _owners(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _owners(inner)


def own_pods(among: list[Manifest]) -> list[Pod]:
    """Return the pods of workloads whose containers run aimage."""
    return [pod for pod in pods(among) if pod.kind != "Pod" and pod.name != "aimage-nats"]


def is_selected(pod: Pod, selector: dict[str, str]) -> bool:
    return selector.items() <= pod.labels.items()


def complaints(pod: Pod) -> list[str]:
    """Return violations of the Pod Security Standards' "restricted" level and further rules."""
    found = []
    outer = pod.spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if pod.spec.get(key):
            found.append(key)
    if pod.spec.get("automountServiceAccountToken") is not False:
        found.append("its token is mounted")
    if pod.spec.get("enableServiceLinks") is not False:
        found.append("services become variables")
    for container in pod.containers:
        inner = {**outer, **container.get("securityContext", {})}
        found += [f"{container['name']}: {each}" for each in _weak(inner, container)]
    return found


def _weak(context: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    if context.get("runAsNonRoot") is not True or context.get("runAsUser", 0) == 0:
        yield "may be root"
    if context.get("runAsGroup", 0) == 0:
        yield "may be in root's group"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "writes to its own files"
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "may get privileges"
    capabilities = context.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield "has capabilities"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "may make any system call"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "takes a port of its node"
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= set(resources.get("requests", {})):
        yield "asks for no resources"
    if "memory" not in resources.get("limits", {}):
        yield "has no limit of memory"


def name(path: Path) -> str:
    return path.relative_to(KUBERNETES).as_posix()


def called(pod: Pod) -> str:
    return f"{pod.kind}/{pod.name}"


def of_kind(kind: str, among: list[Manifest] | None = None) -> list[Manifest]:
    return [one for one in (manifests() if among is None else among) if one["kind"] == kind]


def listens_on(container: Manifest) -> int:
    """Return the port on a command line."""
    (address,) = [a for a in container["args"] if a.startswith("--addr=")]
    return int(address.rpartition(":")[2])

"""Artifacts for transfer.py: random blobs, as OCI image layouts and in a registry.

Shapes: a is one blob of 2 GiB, b 16 of 128 MiB, c 1,200 of 64 KiB to 4 MiB (0.76 GiB), 1g one of
1 GiB. s is 24 small ones, for trying the programs; q is 1,200 of 1 KiB, for quotas of requests.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
OCI = "application/vnd.oci.image.manifest.v1+json"
CHANGED = 0.1  # maximum share of the bytes changed in a second version

Descriptor = dict[str, Any]


def sizes(shape: str) -> list[int]:
    """Return the size of each blob of a shape; the same on every machine."""
    if shape in ("a", "b", "1g"):
        count, each = {"a": (1, 2048), "b": (16, 128), "1g": (1, 1024)}[shape]
        return [each * MIB] * count
    if shape == "q":
        return [1024] * 1200
    count, total = {"c": (1200, 0.76 * 1024 * MIB), "s": (24, 16 * MIB)}[shape]
    rng = random.Random(7)
    drawn = [int(64 * 1024 * 2 ** rng.uniform(0, 6)) for _ in range(count)]
    scale = total / sum(drawn)
    return [min(4 * MIB, max(64 * 1024, int(size * scale))) for size in drawn]


def make_layout(directory: Path, shape: str) -> Path:
    """Create an OCI image layout with one artifact of that shape, named ``bench/<shape>:v1``."""
    layout = directory / f"layout-{shape}"
    if not (layout / "index.json").exists():
        blobs = _begin(layout)
        layers = [_random_layer(blobs, size) for size in sizes(shape)]
        _finish(layout, {f"bench/{shape}:v1": layers})
    return layout


def make_versions(directory: Path, shape: str) -> Path:
    """Create a layout with ``bench/delta-<shape>:v1`` and ``:v2``, which differ in a tenth."""
    layout = directory / f"layout-delta-{shape}"
    if not (layout / "index.json").exists():
        blobs = _begin(layout)
        v1 = [_random_layer(blobs, size) for size in sizes(shape)]
        v2 = list(v1)
        left = int(CHANGED * sum(sizes(shape)))
        for at in random.Random(8).sample(range(len(v1)), len(v1)):
            if v1[at]["size"] <= left:
                left -= v1[at]["size"]
                v2[at] = _random_layer(blobs, v1[at]["size"])
        _finish(layout, {f"bench/delta-{shape}:v1": v1, f"bench/delta-{shape}:v2": v2})
    return layout


def content(layout: Path, name: str) -> list[Descriptor]:
    """Return the config and layers of the artifact with that name in a layout."""
    index = json.loads((layout / "index.json").read_text())
    [entry] = [
        entry
        for entry in index["manifests"]
        if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == name
    ]
    manifest = json.loads(blob_path(layout, entry).read_text())
    return [manifest["config"], *manifest["layers"]]


def blob_path(layout: Path, descriptor: Descriptor) -> Path:
    """Return the path of a blob in a layout."""
    return layout / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:")


def ensure_pushed(layout: Path, name: str, host: str) -> None:
    """Push ``name`` of the layout to the registry at ``host``, unless it is there."""
    target = f"docker://{host}/{name}"
    command = ["skopeo", "inspect", "--raw", "--tls-verify=false", target]
    if subprocess.run(command, capture_output=True).returncode:
        command = ["skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{layout}:{name}"]
        subprocess.run([*command, target], check=True)


def _begin(layout: Path) -> Path:
    shutil.rmtree(layout, ignore_errors=True)
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    return blobs


def _finish(layout: Path, artifacts: dict[str, list[Descriptor]]) -> None:
    """Write the manifests and, at the end, the index."""
    config = {"mediaType": "application/vnd.example.config", **_keep(layout, b"{}")}
    entries = []
    for name, layers in artifacts.items():
        manifest = {"schemaVersion": 2, "mediaType": OCI, "config": config, "layers": layers}
        entry = {"mediaType": OCI, **_keep(layout, json.dumps(manifest).encode())}
        entries.append({**entry, "annotations": {"org.opencontainers.image.ref.name": name}})
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))


def _keep(layout: Path, data: bytes) -> Descriptor:
    digest = hashlib.sha256(data).hexdigest()
    descriptor = {"digest": f"sha256:{digest}", "size": len(data)}
    blob_path(layout, descriptor).write_bytes(data)
    return descriptor


def _random_layer(blobs: Path, size: int) -> Descriptor:
    hasher, left, path = hashlib.sha256(), size, blobs / "new"
    with path.open("wb") as file:
        while left:
            data = os.urandom(min(left, 8 * MIB))
            hasher.update(data)
            file.write(data)
            left -= len(data)
    path.rename(blobs / hasher.hexdigest())
    digest = f"sha256:{hasher.hexdigest()}"
    return {"mediaType": "application/vnd.example.weights", "digest": digest, "size": size}

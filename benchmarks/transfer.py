"""Pull and push next to other tools, against docker-registry on loopback, in one run.

    python benchmarks/transfer.py [--shapes a,b,c] [--rounds 5] [--directory DIR] [--push]

Shapes: a is one blob of 2 GiB, b 16 of 128 MiB, c 1,200 of 64 KiB to 4 MiB (0.76 GiB). A pull
goes into an empty OCI image layout; the time of a peer that does not make its writes durable ends
with a ``sync -f`` of its target, ours includes the fsyncs it does anyway. A push goes to an empty
registry. Rounds are interleaved; the tables show medians, and the ratio to the peer of that table.
Needs docker-registry, skopeo and curl.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024
AIMAGE = str(Path(sys.executable).with_name("aimage"))
OCI = "application/vnd.oci.image.manifest.v1+json"
PUT_ONE = """
d=$(basename "$1"); base=$2
curl -s -o /dev/null -I "$base/blobs/sha256:$d"
where=$(curl -s -o /dev/null -X POST -D - "$base/blobs/uploads/" | tr -d '\\r' |
  sed -n 's/^[Ll]ocation: //p')
curl -s -f -o /dev/null -X PUT -T "$1" "$where&digest=sha256:$d"
"""


@dataclass
class Cost:
    """Wall and client CPU in seconds, peak resident memory in MiB."""

    wall: float
    cpu: float
    rss: float


def sizes(shape: str) -> list[int]:
    """The bytes of each blob of a shape; the same on every machine."""
    if shape == "a":
        return [2048 * MIB]
    if shape == "b":
        return [128 * MIB] * 16
    rng = random.Random(7)
    drawn = [int(64 * 1024 * 2 ** rng.uniform(0, 6)) for _ in range(1200)]
    scale = 0.76 * 1024 * MIB / sum(drawn)
    return [min(4 * MIB, max(64 * 1024, int(size * scale))) for size in drawn]


def measure(command: list[str], then: Callable[[], None] = lambda: None) -> Cost:
    """Run a command, and what must be done after it for its result to be durable."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    then()
    wall = time.perf_counter() - begun
    if process.returncode:
        sys.exit(f"{' '.join(command)[:300]} failed: {said.decode()[-500:]}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


@contextlib.contextmanager
def registry(root: Path) -> Iterator[str]:
    """docker-registry over ``root``; yields host:port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    config = {
        "version": 0.1,
        "log": {"accesslog": {"disabled": True}, "level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(root)}},
        "http": {"addr": host},
    }
    path = root.with_suffix(".yml")
    path.write_text(json.dumps(config))
    with subprocess.Popen(
        ["docker-registry", "serve", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            for _ in range(500):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://{host}/v2/", timeout=1).close()
                    break
                time.sleep(0.02)
            yield host
        finally:
            process.terminate()


def make_layout(directory: Path, shape: str) -> Path:
    """An OCI image layout with one artifact of that shape, named ``bench/<shape>:v1``."""
    layout = directory / f"layout-{shape}"
    if (layout / "index.json").exists():
        return layout
    shutil.rmtree(layout, ignore_errors=True)
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def keep(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    layers = [
        {"mediaType": "application/vnd.example.weights", **_random_blob(blobs, size)}
        for size in sizes(shape)
    ]
    config = {"mediaType": "application/vnd.example.config", **keep(b"{}")}
    manifest = {"schemaVersion": 2, "mediaType": OCI, "config": config, "layers": layers}
    entry = {"mediaType": OCI, **keep(json.dumps(manifest).encode())}
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    index = {"schemaVersion": 2, "manifests": [entry]}
    entry["annotations"] = {"org.opencontainers.image.ref.name": f"bench/{shape}:v1"}
    (layout / "index.json").write_text(json.dumps(index))
    return layout


def _random_blob(blobs: Path, size: int) -> dict[str, object]:
    hasher, left, path = hashlib.sha256(), size, blobs / "new"
    with path.open("wb") as file:
        while left:
            data = os.urandom(min(left, 8 * MIB))
            hasher.update(data)
            file.write(data)
            left -= len(data)
    path.rename(blobs / hasher.hexdigest())
    return {"digest": f"sha256:{hasher.hexdigest()}", "size": size}


def pulls(directory: Path, shapes: list[str], rounds: int) -> None:
    """The table of pulls."""
    root = directory / "registry"
    target = directory / "target"
    with registry(root) as host:
        for shape in shapes:
            _ensure_pushed(make_layout(directory, shape), shape, host)
        rows: dict[str, dict[str, list[Cost]]] = {}
        for _ in range(rounds):
            for shape in shapes:
                name = f"{host}/bench/{shape}:v1"
                commands = {
                    "skopeo copy": [
                        *("skopeo", "copy", "-q", "--src-tls-verify=false"),
                        *(f"docker://{name}", f"oci:{target}:x"),
                    ],
                    "aimage pull": [AIMAGE, "-q", "--store", str(target), "pull", name],
                }
                for tool, command in commands.items():
                    shutil.rmtree(target, ignore_errors=True)
                    os.sync()
                    durable = tool.startswith("aimage")
                    cost = measure(command, lambda d=durable: None if d else _sync(target))
                    rows.setdefault(shape, {}).setdefault(tool, []).append(cost)
        shutil.rmtree(target, ignore_errors=True)
    _print("pull", rows, "skopeo copy")


def pushes(directory: Path, shapes: list[str], rounds: int) -> None:
    """The table of pushes."""
    rows: dict[str, dict[str, list[Cost]]] = {}
    for _ in range(rounds):
        for shape in shapes:
            layout = make_layout(directory, shape)
            for tool in ("curl, 4 at a time", "aimage push"):
                root = directory / "empty"
                shutil.rmtree(root, ignore_errors=True)
                os.sync()
                with registry(root) as host:
                    cost = measure(_push_command(tool, layout, shape, host))
                rows.setdefault(shape, {}).setdefault(tool, []).append(cost)
                shutil.rmtree(root, ignore_errors=True)
    _print("push", rows, "curl, 4 at a time")


def _push_command(tool: str, layout: Path, shape: str, host: str) -> list[str]:
    if tool == "aimage push":
        name = f"{host}/bench/{shape}:v1"
        subprocess.run(
            [AIMAGE, "-q", "--store", str(layout), "tag", f"bench/{shape}:v1", name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return [AIMAGE, "-q", "--store", str(layout), "push", name]
    base = f"http://{host}/v2/bench/{shape}"
    script = f"ls -S {layout}/blobs/sha256/* | xargs -P 4 -I @ sh -c '{PUT_ONE}' sh @ {base}"
    return ["bash", "-c", script.replace("sed -n '", 'sed -n "').replace("//p'", '//p"')]


def _ensure_pushed(layout: Path, shape: str, host: str) -> None:
    target = f"docker://{host}/bench/{shape}:v1"
    seen = subprocess.run(
        ["skopeo", "inspect", "--raw", "--tls-verify=false", target], capture_output=True
    )
    if seen.returncode:
        source = f"oci:{layout}:bench/{shape}:v1"
        subprocess.run(
            ["skopeo", "copy", "-q", "--dest-tls-verify=false", source, target], check=True
        )


def _sync(path: Path) -> None:
    subprocess.run(["sync", "-f", str(path)], check=True)


def _print(verb: str, rows: dict[str, dict[str, list[Cost]]], base: str) -> None:
    print(f"\n| {verb} | tool | wall s | CPU s | peak MiB | ratio |\n|---|---|---|---|---|---|")
    for shape, tools in rows.items():
        reference = statistics.median(cost.wall for cost in tools[base])
        for tool, costs in tools.items():
            wall, cpu, rss = (
                statistics.median(getattr(cost, name) for cost in costs)
                for name in ("wall", "cpu", "rss")
            )
            ratio = wall / reference
            print(f"| {shape} | {tool} | {wall:.2f} | {cpu:.2f} | {rss:.0f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="a,b,c")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--push", action="store_true", help="measure pushes too")
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        pulls(directory, shapes, options.rounds)
        if options.push:
            pushes(directory, shapes, options.rounds)


if __name__ == "__main__":
    main()

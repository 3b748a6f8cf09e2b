"""The parts of fleet.py: a model in a registry, and nodes that keep it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import wire

MIB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[1]
HOST, NAME = "registry.fleet", "bench/fleet"  # reached only through the proxy
REGISTRY = "registry"
OCI = "application/vnd.oci.image.manifest.v1+json"
LARGE = (0.35, 0.20, 0.12, 0.08)  # of the model, one blob each
PORTS = (20000, 30000)  # below the range from which the kernel assigns ports
SMALL = (16 * 1024, MIB)  # bytes of each of the others


def sizes(mib: float) -> list[int]:
    """Return the size of each blob: a few large ones, and small ones for a quarter of the bytes."""
    found = [int(share * mib * MIB) for share in LARGE]
    rng, left = random.Random(7), int(mib * MIB) - sum(found)
    low, high = SMALL
    while left > 0:
        found.append(min(left, int(low * (high / low) ** rng.random())))
        left -= found[-1]
    return found


class Model:
    """A model of random blobs in a registry."""

    def __init__(self, host: str, mib: float) -> None:
        self._base = f"http://{host}/v2/{NAME}"
        self.size = 0
        layers = []
        for size in sizes(mib):
            layers.append(self._push(os.urandom(size), "application/vnd.example.weights"))
            self.size += size
        config = self._push(b"{}", "application/vnd.example.config")
        manifest = {"schemaVersion": 2, "mediaType": OCI, "config": config, "layers": layers}
        self.digests = {layer["digest"] for layer in layers}
        self._manifest = json.dumps(manifest).encode()

    def tag(self, tag: str) -> None:
        """Push the manifest."""
        self._ask("PUT", f"{self._base}/manifests/{tag}", self._manifest, OCI)

    def _push(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        where = self._ask("POST", f"{self._base}/blobs/uploads/")
        joint = "&" if "?" in where else "?"
        self._ask("PUT", f"{where}{joint}digest={digest}", data, "application/octet-stream")
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    @staticmethod
    def _ask(method: str, url: str, data: bytes = b"", media_type: str = "") -> str:
        headers = {"Content-Type": media_type} if media_type else {}
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.headers.get("Location", ""))


class Node:
    """An ``aimage node`` process, on the links of ``name``."""

    def __init__(self, name: str, home: Path, port: int, ways: wire.Wires, others: list[str]):
        self.name, self.home, self.store = name, home, home / "store"
        self.cpu = self.peak = 0.0
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        (home / "desired").mkdir(parents=True)
        self._command = [
            *(sys.executable, "-m", "clowder_aimage.cli", "node", "--plain-http", "-q"),
            *("--addr", f"127.0.0.1:{port}", "--store", str(self.store), "--log-level", "error"),
            *("--desired", str(home / "desired"), "--high", "100", "--low", "100"),
        ]
        for other in others:
            self._command += ["--neighbour", f"127.0.0.1:{ways.ports[name, other]}"]
        self._proxy = f"http://127.0.0.1:{ways.ports[name, REGISTRY]}"

    def want(self, tag: str) -> None:
        """Write the desired state."""
        want = {"ref": f"{HOST}/{NAME}:{tag}", "pullPolicy": "Always", "refresh": "1s"}
        (self.home / "desired" / "model.json").write_text(json.dumps([want]))

    def start(self) -> None:
        kept = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        env = {key: value for key, value in kept.items() if not key.startswith("AIMAGE_")}
        env |= {"HOME": str(self.home), "http_proxy": self._proxy, "PYTHONPATH": str(ROOT)}
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=log, env=env, cwd=self.home
            )

    def end(self, number: int = signal.SIGTERM) -> None:
        """Stop the process, and record its CPU time and memory."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(number)
        _, _, used = os.wait4(self._process.pid, 0)
        self._process.returncode, self._process = 0, None
        self.cpu += used.ru_utime + used.ru_stime
        self.peak = max(self.peak, used.ru_maxrss / 1024)

    def status(self) -> dict[str, Any]:
        """Return its status; an empty object if it does not answer."""
        try:
            url = f"http://127.0.0.1:{self._port}/v1/node"
            with urllib.request.urlopen(url, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            if self._process is None or self._process.poll() is None:
                return {"models": [], "neighbours": []}
            log = (self.home / "log").read_text()[-2000:]
            raise SystemExit(f"{self.name} has ended:\n{log}") from None

    def model(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = self.status()["models"]
        return found[0] if found else {"state": "unknown", "completed": 0, "total": 0}

    def is_right(self, model: Model) -> bool:
        """Return whether its store has every blob, with a matching digest."""
        for digest in model.digests:
            path = self.store / "blobs" / "sha256" / digest.removeprefix("sha256:")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                    return False
        return True


def free_ports(count: int) -> list[int]:
    """Return free ports below the range from which the kernel assigns ports."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found

"""Compare registries that receive: pushes of plain sockets, which cost the client little.

    python -m benchmarks.receive [--shapes b,c] [--servers docker-registry,registry,aimage,aimage:2]
        [--connections 4] [--rounds 5] [--directory DIR]

Rounds are interleaved, and each is into an empty store. A blob is a POST and a PUT; ``shapes.py``
defines the shapes. The table has medians: the wall time until the last response, CPU seconds and
peak MiB of the server with its children, and the ratio of the wall time to the first server.
``registry`` is the program of distribution v3; ``aimage:N`` is ``aimage registry serve`` with N
processes. None of them logs requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import shapes
from benchmarks.transfer import free_host

REPOSITORY = "bench/receive"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    """Seconds, and MiB."""

    wall: float
    cpu: float
    peak: float


class Pusher:
    """A client with one connection, which is opened again if the server closes it."""

    def __init__(self, host: str) -> None:
        address, _, port = host.rpartition(":")
        self._address, self._received = (address, int(port)), b""
        self._socket = socket.create_connection(self._address)

    def push(self, path: Path, digest: str) -> None:
        """Push a blob. Exits unless it is stored."""
        url = f"/v2/{REPOSITORY}/blobs/uploads/"
        location = self._ask("POST", url, 0, None, 202)["location"]
        # Some registries return a URL, some a path
        if not location.startswith("/"):
            location = "/" + location.split("/", 3)[3]
        query = "&" if "?" in location else "?"
        self._ask("PUT", f"{location}{query}digest={digest}", path.stat().st_size, path, 201)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _ask(
        self, method: str, target: str, size: int, body: Path | None, expected: int
    ) -> dict[str, str]:
        """Send a request, and return the headers of its response."""
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        self._socket.sendall(head.encode())
        if body is not None:
            with body.open("rb") as file:
                self._socket.sendfile(file)
        while b"\r\n\r\n" not in self._received:
            self._receive()
        raw, _, self._received = self._received.partition(b"\r\n\r\n")
        status, *lines = raw.decode().split("\r\n")
        parts = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in parts}
        length = int(headers.get("content-length", 0))
        while len(self._received) < length:
            self._receive()
        if int(status.split()[1]) != expected:
            sys.exit(f"{method} {target}: {status} {self._received[:500].decode()}")
        self._received = self._received[length:]
        if headers.get("connection", "").lower() == "close":
            self._socket.close()
            self._socket = socket.create_connection(self._address)
        return headers

    def _receive(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            sys.exit("the server closed the connection")
        self._received += data


@contextlib.contextmanager
def running(server: str, root: Path) -> Iterator[tuple[str, int]]:
    """Run a registry over an empty ``root``, and yield its host and its process id."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    host = free_host()
    name, _, count = server.partition(":")
    if name == "aimage":
        command = [sys.executable, "-m", "clowder_aimage", "-q", "--store", str(root / "store")]
        command += ["registry", "serve", "--addr", host, "--processes", count or "1"]
    else:
        config = {
            "version": 0.1,
            "log": {"accesslog": {"disabled": True}, "level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(root)}},
            "http": {"addr": host},
        }
        path = root / "config.yml"
        path.write_text(json.dumps(config))
        command = [name, "serve", str(path)]
    output = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            address, _, port = host.rpartition(":")
            for _ in range(500):
                with contextlib.suppress(OSError):
                    socket.create_connection((address, int(port))).close()
                    break
                time.sleep(0.02)
            yield host, process.pid
        finally:
            process.terminate()


def measure(server: str, layout: Path, blobs: list[shapes.Descriptor], root: Path, n: int) -> Cost:
    """Push the blobs of a layout over ``n`` connections."""
    with running(server, root) as (host, pid):
        os.sync()
        waiting: queue.SimpleQueue[shapes.Descriptor | None] = queue.SimpleQueue()
        for each in [*blobs, *[None] * n]:
            waiting.put(each)

        def work() -> None:
            with contextlib.closing(Pusher(host)) as pusher:
                while (blob := waiting.get()) is not None:
                    pusher.push(shapes.blob_path(layout, blob), str(blob["digest"]))

        threads = [threading.Thread(target=work) for _ in range(n)]
        cpu, begun = _read_cpu(pid), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - begun
        cost = Cost(wall, _read_cpu(pid) - cpu, _read_peak(pid))
    stored = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    if stored < sum(int(blob["size"]) for blob in blobs):
        sys.exit(f"{server} has stored only {stored} bytes")
    return cost


def _list_processes(pid: int) -> list[int]:
    """Return a process and its children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [pid, *map(int, text.split())]


def _read_cpu(pid: int) -> float:
    seconds = 0.0
    for each in _list_processes(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds


def _read_peak(pid: int) -> float:
    peak = 0.0
    for each in _list_processes(pid):
        lines = Path(f"/proc/{each}/status").read_text().splitlines()
        [line] = (line for line in lines if line.startswith("VmHWM:"))
        peak += int(line.split()[1]) / 1024
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="b,c")
    parser.add_argument("--servers", default="docker-registry,aimage,aimage:2")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    servers = options.servers.split(",")
    print("\n| pushed | server | wall s | CPU s | peak MiB | ratio |\n|---|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        for shape in options.shapes.split(","):
            layout = shapes.make_layout(directory, shape)
            blobs = shapes.content(layout, f"bench/{shape}:v1")
            rows: dict[str, list[Cost]] = {server: [] for server in servers}
            for _ in range(options.rounds):
                for server, costs in rows.items():
                    root = directory / "received"
                    costs.append(measure(server, layout, blobs, root, options.connections))
                    shutil.rmtree(root)
            first = statistics.median(cost.wall for cost in rows[servers[0]])
            for server, costs in rows.items():
                wall, cpu, peak = (
                    statistics.median(getattr(cost, name) for cost in costs)
                    for name in ("wall", "cpu", "peak")
                )
                figures = f"{wall:.2f} | {cpu:.2f} | {peak:.0f} | {wall / first:.2f}"
                print(f"| {shape} | {server} | {figures} |", flush=True)


if __name__ == "__main__":
    main()

"""The attacks of soak.py, in a process of their own: ``python -m benchmarks.attack``.

It prints the host of a hostile registry, and begins when ``Targets`` are written to its stdin as
JSON. Every attack is a loop in a thread, with pauses: the attacked servers have the same processor.
After SIGTERM it prints the counts of what was done.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.target import draw_request
from tests.hostile_registry import BLOB_TIME, FORM, TIME, HostileRegistry
from tests.process import Aimage, end

SLOW = [name for name in (*TIME, *BLOB_TIME) if name not in ("cont", "trailer")]  # use no CPU
LARGE = 60 * 1024 * 1024  # bytes pushed to the full disk
DRIP = 0.5  # seconds between the bytes of a dripping client
KILLED = b"the model process was killed"  # in the answer to whoever waits for a picture
_RESET = struct.pack("ii", 1, 0)  # close with RST


@dataclass
class Targets:
    """What is attacked.

    Attributes:
        hosts: The host and port of each server.
        worker: The process of the worker, whose children are killed.
        model: A model in the registry, with its host.
        blob: The path of a blob of the registry.
        home: A directory for stores of pulls.
        kill_every: Seconds between two kills of the model's process.
        idle: The number of idle connections to each server.
        seed: Of all random choices.
    """

    hosts: dict[str, str]
    worker: int
    model: str
    blob: str
    home: str
    kill_every: float
    idle: int
    seed: int


class Attack:
    """All attacks on ``targets``, until ``over`` is set; ``done`` counts them.

    ``faults`` has the damaged requests that were answered with 500.
    """

    def __init__(self, targets: Targets, hostile: HostileRegistry) -> None:
        self._targets, self._hostile = targets, hostile
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self) -> None:
        attacks = (
            *(self.fuzz, self.leave, self.drip, self.idle, self.kill_model, self.kill_pull),
            *(self.ask_cache, self.ask_worker, self.fill_disk),
        )
        threads = [threading.Thread(target=self._repeat, args=(each,)) for each in attacks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, attack: Callable[[random.Random], float]) -> None:
        """Repeat an attack, which returns the seconds until the next time."""
        rng = random.Random(f"{self._targets.seed}/{attack.__name__}")
        while not self.over.is_set():
            pause = 1.0
            self.done[attack.__name__] += 1
            with contextlib.suppress(OSError, http.client.HTTPException):
                pause = attack(rng)
            self.over.wait(pause)

    def fuzz(self, rng: random.Random) -> float:
        """Send a damaged request to one of the servers."""
        host = rng.choice(list(self._targets.hosts.values()))
        method, path, body, headers = draw_request(rng)
        connection = http.client.HTTPConnection(host, timeout=30)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            self.done[f"fuzz answered {answer.status // 100}xx"] += 1
            if answer.status == 500 and KILLED not in (text := answer.read()):
                self.faults.append(f"500 to {method} {path!r} {headers} {body!r}: {text[:300]!r}")
            if answer.status == 202 and (place := answer.getheader("Location")):
                answer.read()
                connection.request("DELETE", place)  # an upload stays open for an hour
                answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
        return 0.05

    def leave(self, rng: random.Random) -> float:
        """Disconnect in the middle of a request or of its answer."""
        name = rng.choice(list(self._targets.hosts))
        with self._connect(name) as client:
            if name == "worker":
                body = json.dumps({"model": "soak", "prompt": "a", "size": "32x32", "steps": 20})
                head = f"POST /v1/images/generations HTTP/1.1\r\nHost: {self._targets.hosts[name]}"
                kind = "Content-Type: application/json"
                request = f"{head}\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            else:
                head = f"GET {self._targets.blob} HTTP/1.1\r\nHost: {self._targets.hosts[name]}"
                request = f"{head}\r\n\r\n".encode()
            client.sendall(request[: rng.choice((len(request), rng.randrange(len(request))))])
            client.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                client.recv(rng.randrange(1, 2000))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return 0.2

    def drip(self, rng: random.Random) -> float:
        """Send requests to all servers byte by byte: heads, and bodies of uploads."""
        with contextlib.ExitStack() as stack:
            clients = []
            for name, host in self._targets.hosts.items():
                for start in ("GET /", f"POST /api/show HTTP/1.1\r\nHost: {host}\r\n"):
                    client = stack.enter_context(self._connect(name))
                    if start.startswith("POST"):
                        start += "Content-Type: application/json\r\nContent-Length: 900\r\n\r\n"
                    client.sendall(start.encode())
                    clients.append(client)
            for _ in range(60):
                if self.over.wait(DRIP):
                    break
                for client in clients:
                    with contextlib.suppress(OSError):
                        client.sendall(b"x")
        return 0.0

    def idle(self, rng: random.Random) -> float:
        """Keep connections open that send nothing, then close them and open others."""
        with contextlib.ExitStack() as stack:
            for name in self._targets.hosts:
                for _ in range(self._targets.idle):
                    with contextlib.suppress(OSError):
                        stack.enter_context(self._connect(name))
                    if self.over.wait(0.005):
                        return 0.0
            self.over.wait(20)
        return 0.0

    def kill_model(self, rng: random.Random) -> float:
        """Kill the process of the worker's model."""
        for child in children(self._targets.worker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                self.done["models killed"] += 1
        return self._targets.kill_every

    def kill_pull(self, rng: random.Random) -> float:
        """Kill a pull from the registry; those of one store resume each other."""
        home = Path(self._targets.home)
        store = home / "pulled"
        child = Aimage(home, store).start("pull", "-q", self._targets.model)
        try:
            child.wait(rng.uniform(0.2, 2))
            shutil.rmtree(store, ignore_errors=True)
        except subprocess.TimeoutExpired:
            self.done["pulls killed"] += 1
        finally:
            end(child)
        return 2.0

    def ask_cache(self, rng: random.Random) -> float:
        """Ask the cache for a manifest of its upstream, which is hostile."""
        path = f"/v2/{rng.choice((*SLOW, *FORM))}/manifests/{rng.getrandbits(32)}"
        head = f"GET {path} HTTP/1.1\r\nHost: {self._targets.hosts['cache']}\r\n\r\n"
        with self._connect("cache") as client:
            client.sendall(head.encode())
            self.over.wait(rng.uniform(0, 1))
        return 0.1

    def ask_worker(self, rng: random.Random) -> float:
        """Let the worker pull from a hostile registry."""
        body = json.dumps({"model": f"{self._hostile.host}/{rng.choice(SLOW)}:v1"})
        connection = http.client.HTTPConnection(self._targets.hosts["worker"], timeout=5)
        try:
            connection.request("POST", "/api/pull", body, {"Content-Type": "application/json"})
            connection.getresponse().read(200)
        finally:
            connection.close()
        return 1.0

    def fill_disk(self, rng: random.Random) -> float:
        """Push more to the full disk than it can hold."""
        if "full" not in self._targets.hosts:
            return 60.0
        host = self._targets.hosts["full"]
        connection = http.client.HTTPConnection(host, timeout=30)
        try:
            connection.request("POST", "/v2/a/blobs/uploads/")
            answer = connection.getresponse()
            answer.read()
            place = str(answer.getheader("Location")).removeprefix(f"http://{host}")
            chunked = ({"Content-Length": str(LARGE)}, {})[rng.randrange(2)]
            connection.request("PATCH", place, _zeros(), chunked, encode_chunked=not chunked)
            self.done[f"full disk answered {connection.getresponse().status}"] += 1
        finally:
            connection.close()
        return 1.0

    def _connect(self, name: str) -> socket.socket:
        host, _, port = self._targets.hosts[name].rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)


def _zeros() -> Any:
    """Yield the body of a large upload, slowly enough to leave time to others."""
    for _ in range(0, LARGE, 1 << 20):
        yield bytes(1 << 20)
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process started."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def main() -> None:
    with HostileRegistry("127.0.0.2").running() as hostile:
        print(hostile.host, flush=True)
        attack = Attack(Targets(**json.loads(sys.stdin.readline())), hostile)
        signal.signal(signal.SIGTERM, lambda *_: attack.over.set())
        attack.run()
    print(json.dumps([attack.done, attack.faults]), flush=True)


if __name__ == "__main__":
    main()

"""Measure good clients of all servers while these are attacked: ``python -m benchmarks.soak``.

    python -m benchmarks.soak [--minutes 10] [--calm MINUTES] [--idle 200] [--seed S] [--json]

A worker, a registry, a node, a cache of a hostile registry, and (as root) a registry on a full disk
run as child processes. Good clients measure them without attack, then during the attacks of
attack.py: damaged requests, clients that drip or leave, idle connections, kills of the model's
process and of pulls, registries that drip. Goals: no wrong answer and no traceback, the p99 of each
good request at most 3 times that without attack, memory and descriptors constant: the median of the
last third within 10 % of the first third's, after a warm-up. The exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import http.client
import json
import os
import random
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attack import KILLED, SLOW, Targets, children
from clowder_aimage.distribution.upstream import MAX_REPOSITORIES
from tests.process import Aimage, end, spawn

ROOT = Path(__file__).resolve().parents[1]
MIB = 1024 * 1024
RATIO, GROWTH = 3.0, 0.1  # goals
SPARE = {"resident": 4 * MIB, "files": 12}  # growth that is permitted in any case
KEPT = {"cache": MAX_REPOSITORIES}  # connections to other servers that are kept
WARM = 1 / 6  # of the attack, before memory and descriptors are compared
SETTLE = 90.0  # seconds after the attack until the descriptors must be closed
PAUSE = 0.1  # seconds between the requests of a good client
DISK = 24 * MIB
REPOSITORY, MODEL = "team/soak", "soak"
BLOB = random.Random(7).randbytes(2 * MIB)
BLOBS = 50  # different ones that are pushed, again and again
SEEDS = 4  # different pictures
KINDS = ("resident", "files")
REFUSED = (429, 503)
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class WrongError(Exception):
    """An answer that is not the expected one."""


class RefusedError(Exception):
    """An answer that asks the client to try again."""


def fetch(
    host: str, method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream"
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Return the status, headers and body of a response."""
    connection = http.client.HTTPConnection(host, timeout=120)
    try:
        connection.request(method, path, body or None, {"Content-Type": kind})
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
    finally:
        connection.close()
    if found[0] in REFUSED and "Retry-After" in found[1]:
        raise RefusedError(found[2][:200])
    return found


def expect(found: tuple[int, Any, bytes], status: int, body: bytes | None = None) -> bytes:
    if found[0] != status or (body is not None and found[2] != body):
        raise WrongError(f"{found[0]}, {len(found[2])} bytes: {found[2][:200]!r}")
    return found[2]


class Server:
    """A child process that serves; its log is a file."""

    def __init__(self, name: str, here: Aimage, *arguments: object) -> None:
        self.name = name
        self._log = here.home / f"{name}.log"
        said = (*arguments, "--addr", "127.0.0.1:0", "--log-level", "error")
        with self._log.open("w") as log:
            self.child = here.start(*said, stderr=log)
        assert self.child.stdout is not None
        self.host = self.child.stdout.readline().strip().removeprefix("http://")
        assert self.host, self._log.read_text()

    def figures(self) -> dict[str, int]:
        """Return the resident bytes and the number of open descriptors."""
        return figures(self.child.pid)

    def tracebacks(self) -> list[str]:
        """Return the logged tracebacks, and the end of the process if it has ended."""
        text = self._log.read_text(errors="replace")
        found = [part[:1000] for part in text.split("Traceback")[1:]]
        code = self.child.poll()
        return found if code is None else [*found, f"ended with {code}: {text[-500:]}"]


def figures(pid: int) -> dict[str, int]:
    process = Path("/proc") / str(pid)
    pages = int((process / "statm").read_text().split()[1])
    count = len(list((process / "fd").iterdir()))
    return {"resident": pages * os.sysconf("SC_PAGE_SIZE"), "files": count}


def spare(name: str, kind: str) -> int:
    """Return the growth of a server that is permitted in any case."""
    return SPARE[kind] + (KEPT.get(name, 0) if kind == "files" else 0)


@dataclass
class Measured:
    """What a good client saw: seconds of right answers by phase, and the others."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def percentile(self, phase: str, percent: int) -> float | None:
        found = sorted(self.seconds.get(phase, []))
        return found[min(len(found) - 1, len(found) * percent // 100)] if found else None

    def report(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"wrong": self.wrong, "refused": dict(self.refused)}
        for phase, found in self.seconds.items():
            shown[phase] = {"count": len(found)}
            shown[phase] |= {f"p{each}": self.percentile(phase, each) for each in (50, 99)}
        calm, attacked = (self.percentile(phase, 99) for phase in ("calm", "attack"))
        shown["ratio"] = attacked / calm if calm and attacked else None
        return shown


class World:
    """The servers on temporary stores, and the requests of good clients."""

    def __init__(self, home: Path, stack: contextlib.ExitStack) -> None:
        self.home, self._stack = home, stack
        self.attack = spawn(
            [sys.executable, "-m", "benchmarks.attack"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        stack.callback(end, self.attack)
        assert self.attack.stdout is not None
        self.hostile = self.attack.stdout.readline().strip()
        self.servers: dict[str, Server] = {}
        here = self._here("worker")
        for name in (MODEL, "tiny"):  # damaged requests may delete the other
            here("create", "-q", name, ROOT / "examples" / "tiny")
        (home / "desired").mkdir()
        self._start("worker", "serve", "--default-model", MODEL, "--queue", 64, "--no-png-facts")
        self._start("registry", "registry", "serve")
        self.model = f"{self.servers['registry'].host}/{REPOSITORY}:v1"
        here("tag", "-q", MODEL, self.model)
        here("push", "-q", self.model)
        self._desire("good", self.model)
        self._start("node", "node", "--desired", home / "desired")
        self._start("cache", "registry", "serve", "--upstream", self.hostile)
        if os.geteuid() == 0:
            self._mount("full")
        for name in {"registry", "full"} & set(self.servers):
            self.push(self.servers[name].host, BLOB)
        self.manifest = expect(self._get("registry", f"/v2/{REPOSITORY}/manifests/v1"), 200)
        self.pictures = [self._picture(seed) for seed in range(SEEDS)]
        while not self._is_present():
            time.sleep(0.1)

    def _here(self, name: str) -> Aimage:
        (self.home / name).mkdir(exist_ok=True)
        return Aimage(self.home / name, self.home / name / "store")

    def _start(self, name: str, *arguments: object) -> None:
        self.servers[name] = Server(name, self._here(name), *arguments)
        self._stack.callback(end, self.servers[name].child)

    def _mount(self, name: str) -> None:
        """Start a registry on a small disk, if one can be mounted."""
        here = self._here(name)
        here.store.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(here.store)]
        if not subprocess.run(mount, capture_output=True).returncode:
            self._stack.callback(subprocess.run, ["umount", "-l", str(here.store)], check=True)
            self._start(name, "registry", "serve")

    def _desire(self, name: str, *references: str) -> None:
        wants = [{"ref": each} for each in references]
        (self.home / "desired" / f"{name}.json").write_text(json.dumps(wants))

    def begin(self, seconds: float, idle: int, seed: int) -> None:
        """Begin the attack."""
        self._desire("hostile", *(f"{self.hostile}/{each}:v1" for each in SLOW))
        hosts = {name: server.host for name, server in self.servers.items()}
        path = f"/v2/a/blobs/sha256:{hashlib.sha256(BLOB).hexdigest()}"
        every = max(4.0, min(60.0, seconds / 3))
        worker = self.servers["worker"].child.pid
        targets = Targets(hosts, worker, self.model, path, str(self.home), every, idle, seed)
        assert self.attack.stdin is not None
        self.attack.stdin.write(json.dumps(asdict(targets)) + "\n")
        self.attack.stdin.flush()

    def finish(self) -> tuple[dict[str, int], list[str]]:
        """End the attack; return its counts, and the servers' faults that it found."""
        self.attack.send_signal(signal.SIGTERM)
        (self.home / "desired" / "hostile.json").unlink()
        out, _ = self.attack.communicate(timeout=120)
        counts, faults = json.loads(out.splitlines()[-1])
        return counts, faults

    def check_killed_pulls(self) -> list[str]:
        """Pull to the store whose pulls were killed; return what is wrong with it."""
        here = Aimage(self.home, self.home / "pulled")
        done = [here.attempt(*verb) for verb in (("pull", "-q", self.model), ("verify",))]
        return [each.err for each in done if each.code]

    # -- good clients

    def requests(self) -> dict[str, Callable[[int], None]]:
        """Return what good clients do, by name; each raises WrongError for a wrong answer."""
        found: dict[str, Callable[[int], None]] = {
            "worker: models": self._ask_models,
            "worker: picture": self._ask_picture,
            "registry: push a blob": self._push_blob,
            "registry: pull a blob": lambda number: self._pull("registry"),
            "registry: manifest": self._ask_manifest,
            "cache: ping": lambda number: self._ping("cache"),
            "node: readyz": self._ask_node,
        }
        if "full" in self.servers:
            found["full disk: pull a blob"] = lambda number: self._pull("full")
        return found

    def _get(self, name: str, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        return fetch(self.servers[name].host, "GET", path)

    def _ask_models(self, number: int) -> None:
        found = json.loads(expect(self._get("worker", "/v1/models"), 200))
        if not any(each["id"].partition(":")[0] == MODEL for each in found["data"]):
            raise WrongError(f"no model: {found}")

    def _picture(self, seed: int) -> bytes:
        asked = {"model": MODEL, "prompt": "a dog", "steps": 1, "size": "32x32", "seed": seed}
        host, body = self.servers["worker"].host, json.dumps(asked).encode()
        found = fetch(host, "POST", "/v1/images/generations", body, "application/json")
        if found[0] == 500 and KILLED in found[2]:
            raise RefusedError(KILLED.decode())
        return base64.b64decode(json.loads(expect(found, 200))["data"][0]["b64_json"])

    def _ask_picture(self, number: int) -> None:
        if self._picture(number % SEEDS) != self.pictures[number % SEEDS]:
            raise WrongError(f"another picture of seed {number % SEEDS}")

    def push(self, host: str, blob: bytes) -> str:
        """Push a blob and return its path."""
        digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        found = fetch(host, "POST", "/v2/good/blobs/uploads/")
        expect(found, 202)
        place = found[1]["Location"].removeprefix(f"http://{host}")
        mark = "&" if "?" in place else "?"
        expect(fetch(host, "PUT", f"{place}{mark}digest={digest}", blob), 201)
        return f"/v2/good/blobs/{digest}"

    def _push_blob(self, number: int) -> None:
        blob = random.Random(number % BLOBS).randbytes(64 * 1024)
        path = self.push(self.servers["registry"].host, blob)
        expect(self._get("registry", path), 200, blob)

    def _pull(self, name: str) -> None:
        path = f"/v2/good/blobs/sha256:{hashlib.sha256(BLOB).hexdigest()}"
        expect(self._get(name, path), 200, BLOB)

    def _ask_manifest(self, number: int) -> None:
        found = self._get("registry", f"/v2/{REPOSITORY}/manifests/v1")
        expect(found, 200, self.manifest)

    def _ping(self, name: str) -> None:
        expect(self._get(name, "/v2/"), 200)

    def _ask_node(self, number: int) -> None:
        """Ask whether the node is ready; during the attack, some models cannot be pulled."""
        try:
            found = self._get("node", "/readyz")
        except RefusedError:
            found = self._get("node", "/healthz")
        if found[0] not in (200, 503) or not json.loads(found[2]):
            expect(found, 200)
        if not self._is_present():
            raise WrongError("the node lost its model")

    def _is_present(self) -> bool:
        models = json.loads(expect(self._get("node", "/v1/node"), 200))["models"]
        found = [each["state"] for each in models if each["ref"] == self.model]
        return found == ["present"]

    def figures(self) -> dict[str, dict[str, int]]:
        """Return the memory and descriptors of each server, and of the worker's model."""
        found = {name: server.figures() for name, server in self.servers.items()}
        for child in children(self.servers["worker"].child.pid)[:1]:
            with contextlib.suppress(OSError):
                found["model"] = figures(child)
        return found


class Clients:
    """A thread for each good request, until the context ends."""

    def __init__(self, world: World) -> None:
        self.measured = {name: Measured() for name in world.requests()}
        self.phase = "warm-up"
        self._requests = world.requests()
        self._over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._repeat, args=(name,)) for name in self._requests]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _repeat(self, name: str) -> None:
        measured, number = self.measured[name], 0
        while not self._over.wait(PAUSE):
            number += 1
            phase, begun = self.phase, time.perf_counter()
            try:
                self._requests[name](number)
            except RefusedError as error:
                measured.refused[str(error)] += 1
            except Exception as error:
                measured.wrong.append(f"{phase}, {number}: {error!r}")
            else:
                took = time.perf_counter() - begun
                measured.seconds.setdefault(phase, []).append(took)


@dataclass
class Report:
    """All results of a run."""

    seed: int
    clients: dict[str, dict[str, Any]]
    attacks: dict[str, int]
    faults: list[str]
    start: dict[str, dict[str, int]]
    samples: list[dict[str, Any]]
    end: dict[str, dict[str, int]]

    @property
    def wrong(self) -> list[str]:
        """Return the wrong answers, and the faults of servers."""
        found = [f"{name}: {each}" for name, it in self.clients.items() for each in it["wrong"]]
        return found + self.faults

    def open_files(self) -> list[str]:
        """Return the servers whose descriptors were not closed after the attack."""
        return [
            f"{name}: {self.start[name]['files']} descriptors before, {it['files']} after"
            for name, it in self.end.items()
            if name in self.start and it["files"] > self.start[name]["files"] + spare(name, "files")
        ]

    def growth(self) -> list[tuple[str, str, float, float, bool]]:
        """Return server, kind, the medians of the first and last third, and whether it grew."""
        last = max((sample["at"] for sample in self.samples), default=0.0)
        warm = [sample for sample in self.samples if sample["at"] >= WARM * last]
        third, rows = max(1, len(warm) // 3), []
        for name in self.start:
            for kind in KINDS:
                parts = [
                    [each["servers"][name][kind] for each in part if name in each["servers"]]
                    for part in (warm[:third], warm[-third:])
                ]
                if all(parts):
                    first, end_ = map(statistics.median, parts)
                    permitted = max(first * (1 + GROWTH), first + spare(name, kind))
                    rows.append((name, kind, first, end_, end_ > permitted))
        return rows

    def missed(self) -> list[str]:
        """Return the goals that were missed."""
        found = [*self.wrong, *self.open_files()]
        for name, it in self.clients.items():
            if it["ratio"] is None or it["ratio"] > RATIO:
                found.append(f"{name}: p99 under attack is {it['ratio'] or 0:.1f} times the other")
        for name, kind, first, last, grew in self.growth():
            if grew:
                found.append(f"{name}: {kind} grew from {first:.0f} to {last:.0f}")
        return found

    def print(self) -> None:
        print(f"seed {self.seed}; attacks: {self.attacks}\n")
        print("| request | calm: p50, p99 ms | attack: p50, p99 ms | ratio | refused | wrong |")
        print("|---|---|---|---|---|---|")
        for name, it in self.clients.items():
            shown = [
                ", ".join(f"{it[phase][each] * 1000:.0f}" for each in ("p50", "p99"))
                if phase in it
                else "-"
                for phase in ("calm", "attack")
            ]
            counts = f"{sum(it['refused'].values())} | {len(it['wrong'])}"
            print(f"| {name} | {shown[0]} | {shown[1]} | {it['ratio'] or 0:.1f} | {counts} |")
        print("\n| server | start: MiB, files | each minute | end |\n|---|---|---|---|")
        step = max(1, len(self.samples) * 60 // max(60, round(self.samples[-1]["at"])))
        for name in self.start:
            chosen = [each["servers"].get(name) for each in self.samples[step - 1 :: step]]
            shown = [
                "-" if it is None else f"{it['resident'] / MIB:.0f}, {it['files']}"
                for it in (self.start[name], *chosen, self.end.get(name))
            ]
            print(f"| {name} | {shown[0]} | {'; '.join(shown[1:-1])} | {shown[-1]} |")
        print("\n" + "\n".join(f"missed: {each}" for each in self.missed() or ["nothing"]))


def soak(minutes: float, calm: float, idle: int, seed: int) -> Report:
    """Measure for ``calm`` minutes without attack, and for ``minutes`` with it."""
    samples: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        world = World(home, stack)
        clients = Clients(world)
        with clients.running():
            time.sleep(min(20.0, calm * 60 / 4))
            clients.phase, start = "calm", world.figures()
            time.sleep(calm * 60)
            world.begin(minutes * 60, idle, seed)
            clients.phase, begun = "attack", time.monotonic()
            while (at := time.monotonic() - begun) < minutes * 60:
                samples.append({"at": at, "servers": world.figures()})
                time.sleep(max(0.5, minutes / 5))
            clients.phase = "after"
            counts, faults = world.finish()
        faults += world.check_killed_pulls()
        found = {name: it.report() for name, it in clients.measured.items()}
        report = Report(seed, found, counts, faults, start, samples, world.figures())
        until = time.monotonic() + SETTLE
        while report.open_files() and time.monotonic() < until:
            time.sleep(0.2)
            report.end = world.figures()
        for name, server in world.servers.items():
            faults += [f"{name}: {each}" for each in server.tracebacks()]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], prog="python -m benchmarks.soak"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of the attack")
    parser.add_argument("--calm", type=float, help="minutes before it [default: a fifth]")
    parser.add_argument("--idle", type=int, default=200, help="idle connections to each server")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    calm = options.minutes / 5 if options.calm is None else options.calm
    report = soak(options.minutes, calm, options.idle, options.seed)
    if options.json:
        print(json.dumps(asdict(report) | {"missed": report.missed()}))
    else:
        report.print()
    return int(bool(report.missed()))


if __name__ == "__main__":
    sys.exit(main())

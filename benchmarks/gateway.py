"""Measure what a gateway adds to workers, and how a fleet scales, with engines that only sleep.

    python -m benchmarks.gateway latency|throughput|streams|affinity|scaling [--workers N,...]
        [--seconds S] [--rounds N] [--json]

Gateways are ``aimage gateway``, the NATS server is nats-server with a directory. Workers take jobs
with the code of ``aimage serve --join``; their engine sleeps ``--seconds`` for each picture, one
after another for each model, and a second to load a model, so that two cores suffice for many
workers. Each of their processes has at most eight.

latency      one client, in turns directly and by the gateway: the difference at p50 and p99
throughput   as many clients as fit twice, in turns directly and by two gateways: the ratio
streams      200 texts at once: all pieces in order, and the delay of a piece on its way
affinity     20 models, Zipf-distributed, 8 workers with two slots: jobs that met a loaded model
scaling      jobs per second by the number of workers, divided by their number: ratio to one
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from benchmarks.jobs import ENVIRONMENT, PICTURES, Program, free_port, percentiles
from clowder_aimage.api.request_body import read_checked
from clowder_aimage.cli.console.fleet_access import build_fleet_access
from clowder_aimage.errors import NotFoundError
from clowder_aimage.fleet.joined_worker import JoinedWorker, WorkerIdentity
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import WORKER
from clowder_aimage.http.app import build_app
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.local_call import LocalCalls
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.response_writer import ResponseWriter
from clowder_aimage.http.route import INFER, Role, Route, SharedRoute
from clowder_aimage.http.server import accepting
from clowder_aimage.oci import Reference

CHAT = "/v1/chat/completions"
TEXT = "text:latest"
NAMES = (TEXT, *(f"m{at}:latest" for at in range(1, 21)))
MODELS = {name: f"sha256:{hashlib.sha256(name.encode()).hexdigest()}" for name in NAMES}
LOAD = 1.0  # seconds to load a model
PIECES, PAUSE = 40, 0.1  # of a text, seconds between two
TOGETHER = 8  # workers of a process


class SleepingRole(Role):
    """A worker whose models sleep, one job at a time for each; ``slots`` are in memory."""

    def __init__(self, slots: int, seconds: float, loaded: tuple[str, ...]) -> None:
        self._slots, self._seconds = slots, seconds
        self.memory: OrderedDict[str, int] = OrderedDict((name, 0) for name in loaded)
        self.loading = set[str]()
        self.eviction_cost: Callable[[str], float] = lambda _: 0.0
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._is_free = asyncio.Condition()

    def build_routes(self) -> list[Route]:
        handlers = {PICTURES: self._make, CHAT: self._tell}
        return [SharedRoute("POST", path, each, INFER) for path, each in handlers.items()]

    async def _make(self, request: Request) -> web.StreamResponse:
        body = await read_checked(request, dict)
        is_warm = await self.work(str(Reference.parse(body["model"].partition("@")[0])))
        return web.json_response({"data": [{"b64_json": body["prompt"]}], "warm": is_warm})

    async def work(self, name: str) -> bool:
        """Sleep as a job does; return whether no model had to be loaded for it."""
        async with self._turns[name]:
            is_warm = await self._load(name)
            await asyncio.sleep(self._seconds)
            async with self._is_free:
                self.memory[name] -= 1
                self._is_free.notify_all()
        return is_warm

    async def _load(self, name: str) -> bool:
        async with self._is_free:
            is_warm = name in self.memory
            while not is_warm and len(self.memory) >= self._slots:
                idle = [one for one, jobs in self.memory.items() if not jobs]
                if not idle:
                    await self._is_free.wait()
                else:  # as the scheduler of an engine: of the least cost, then the oldest
                    del self.memory[min(idle, key=lambda one: self.eviction_cost(MODELS[one]))]
            self.memory[name] = self.memory.get(name, 0) + 1
            self.memory.move_to_end(name)
        if not is_warm:
            self.loading.add(name)
            await asyncio.sleep(LOAD)
            self.loading.discard(name)
        return is_warm

    async def _tell(self, request: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        answer = ResponseWriter(request, response)
        await answer.begin()
        for _ in range(PIECES):
            delta = {"content": f"{time.monotonic()} "}
            event = {"id": "x", "choices": [{"index": 0, "delta": delta}]}
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(PAUSE)
        await answer.write(b"data: [DONE]\n\n")
        return await answer.end()


class ScriptedStore:
    """A store with the models of this benchmark."""

    root = Path("/")

    def compute_fingerprint(self) -> str:
        return "unchanged"

    def resolve(self, reference: Reference) -> Any:
        if str(reference) not in MODELS:
            raise NotFoundError(f"{reference} not found")
        return SimpleNamespace(digest=MODELS[str(reference)])


def service_of(role: SleepingRole, slots: int) -> Any:
    """Return what a joined worker needs of a worker."""

    def loaded() -> list[Any]:
        names = [name for name in role.memory if name not in role.loading]
        return [SimpleNamespace(variants=[MODELS[name]], is_ready=True) for name in names]

    class ScriptedEngine:
        """An engine whose memory has room for a model in each slot."""

        list_loaded, is_draining = staticmethod(loaded), False

        @property
        def room(self) -> int:
            return max(0, slots - len(role.memory))

        def set_eviction_cost(self, cost: Callable[[str], float]) -> None:
            role.eviction_cost = cost

    settings = SimpleNamespace(max_models=slots, parallel=32, pull="never", aliases={})
    settings.default_model, settings.default_for = None, ()
    return SimpleNamespace(
        settings=settings,
        store=ScriptedStore(),
        descriptions=None,
        engine=ScriptedEngine(),
        resolve_reference=lambda name: Reference.parse(name or "m1"),
        metrics=SimpleNamespace(registry=CollectorRegistry()),
    )


def know_models(joined: JoinedWorker) -> None:
    """Let a worker have all models of this benchmark in its store."""
    view = joined._view
    view.models, view._fingerprint = MODELS, (view.store.compute_fingerprint(), None)
    view.needs = dict.fromkeys(MODELS.values(), 1)
    view.kinds = {one: "text" if name == TEXT else "image" for name, one in MODELS.items()}


async def run_workers(options: argparse.Namespace) -> None:
    """Run the workers of one process, until it is killed."""
    async with contextlib.AsyncExitStack() as stack:
        for at, port in enumerate(map(int, options.ports.split(",")), options.first):
            warm = (TEXT,) if options.slots > 2 else ()
            role = SleepingRole(options.slots, options.seconds, (*warm, "m1:latest"))
            access = build_fleet_access(options.nats, {}, WORKER)
            link = FleetLink(access, WORKER, f"w{at}")
            service = service_of(role, options.slots)
            joined = JoinedWorker(link, service, LocalCalls(role), WorkerIdentity(f"w{at}"))
            know_models(joined)
            listening = listen(f"127.0.0.1:{port}", has_tokens=False)
            await stack.enter_async_context(joined.running())
            await stack.enter_async_context(accepting(build_app(role), listening))
        await asyncio.Event().wait()


class SleepingFleet:
    """The processes of a fleet of ``workers``."""

    def __init__(
        self, place: Path, workers: int, gateways: int, slots: int, seconds: float
    ) -> None:
        port = free_port()
        self.url, self.place, self.count = f"nats://127.0.0.1:{port}", place, workers
        server = ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"{place}/js"]
        self.nats = Program("nats", port, server, place)
        # The keys of the fleet are in the configuration of this user.
        ENVIRONMENT["XDG_CONFIG_HOME"] = str(place / "config")
        self.ports = [free_port() for _ in range(workers)]
        self.programs = []
        for first in range(0, workers, TOGETHER):
            ports = ",".join(map(str, self.ports[first : first + TOGETHER]))
            more = ["--nats", self.url, "--ports", ports, "--first", str(first)]
            more += ["--slots", str(slots), "--seconds", str(seconds)]
            command = [sys.executable, "-m", "benchmarks.gateway", "workers", *more]
            self.programs.append(Program(f"w{first}", self.ports[first], command, place))
        aimage = [sys.executable, "-m", "clowder_aimage.cli"]
        self.gateways = []
        for at in range(gateways):
            port = free_port()
            command = [*aimage, "gateway", "--nats", self.url, "--addr", f"127.0.0.1:{port}"]
            self.gateways.append(Program(f"g{at}", port, command, place))
        self.init = [*aimage, "fleet", "init", "--nats", self.url]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Run the fleet until all gateways know all workers; yield a client."""
        programs = [*self.programs, *self.gateways]
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=120)
        try:
            self.nats.start()
            await self.nats.answers()
            making = await asyncio.create_subprocess_exec(*self.init, env=ENVIRONMENT, stdout=-3)
            assert await making.wait() == 0
            for each in programs:
                each.start()
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                for each in programs:
                    await asyncio.wait_for(each.answers(), 120)
                for each in self.gateways:
                    await self._know(session, each.port)
                yield session
        finally:
            for each in (*programs, self.nats):
                each.kill()

    async def _know(self, session: aiohttp.ClientSession, port: int) -> None:
        async with asyncio.timeout(120):
            while True:
                async with session.get(f"http://127.0.0.1:{port}/v1/fleet") as answer:
                    value = await answer.json() if answer.status == 200 else {}
                    if len(value.get("workers", ())) == self.count:
                        return
                await asyncio.sleep(0.1)


async def ask(session: aiohttp.ClientSession, port: int, model: str, prompt: str) -> Any:
    """Return the response for a picture; 503 is asked again, as clients do."""
    while True:
        body = {"model": model, "prompt": prompt, "seed": 1}
        async with session.post(f"http://127.0.0.1:{port}{PICTURES}", json=body) as answer:
            value = await answer.json()
            if answer.status == 200:
                assert value["data"][0]["b64_json"] == prompt, "another's picture"
                return value
            assert answer.status == 503, value
        await asyncio.sleep(0.02)


async def latency(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    fleet = SleepingFleet(place, options.workers[0], 1, 1, options.seconds)
    times: dict[str, list[float]] = {"direct": [], "gateway": []}
    ports = {"direct": fleet.ports[0], "gateway": fleet.gateways[0].port}
    async with fleet.running() as session:
        for number in range(-10, options.rounds):
            for way, port in ports.items():
                begun = time.monotonic()
                await ask(session, port, "m1", f"{number}")
                if number >= 0:
                    times[way].append(time.monotonic() - begun)
    found = {way: percentiles(each) for way, each in times.items()}
    added = [round(found["gateway"][at] - found["direct"][at], 1) for at in (0, 1)]
    return {"p50_p99_ms": found, "added_ms": added}


async def throughput(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    count = options.workers[0]
    fleet = SleepingFleet(place, count, 2, 1, options.seconds)
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    async with fleet.running() as session:
        ways = {"direct": fleet.ports, "gateway": [each.port for each in fleet.gateways]}
        for _ in range(options.rounds):
            for way, ports in ways.items():
                rates[way].append(await rate(session, ports, count, 20 * options.seconds))
    found = {way: round(statistics.median(each), 2) for way, each in rates.items()}
    return {"per_second": found, "ratio": round(found["gateway"] / found["direct"], 3)}


async def rate(
    session: aiohttp.ClientSession, ports: list[int], workers: int, seconds: float
) -> float:
    """Return the jobs per second of three clients for each worker, after they have begun."""
    warm_up = min(1.5, seconds)
    done, end = 0, time.monotonic() + warm_up + seconds
    counted: list[float] = []

    async def client(at: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            done += 1
            await ask(session, ports[at % len(ports)], "m1", f"{done}")
            counted.append(time.monotonic())

    await asyncio.gather(*(client(at) for at in range(3 * workers)))
    kept = [one for one in counted if end - seconds <= one <= end]
    return len(kept) / seconds


async def streams(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    fleet = SleepingFleet(place, options.workers[0], 2, 3, options.seconds)
    delays: list[float] = []
    whole = 0

    async def read(port: int) -> None:
        nonlocal whole
        body = {"model": "text", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        sent: list[float] = []
        async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    value = json.loads(line[6:])
                    sent.append(float(value["choices"][0]["delta"]["content"]))
                    delays.append(time.monotonic() - sent[-1])
        whole += len(sent) == PIECES and sent == sorted(sent)

    async with fleet.running() as session:
        ports = [each.port for each in fleet.gateways]
        begun = time.monotonic()
        await asyncio.gather(*(read(ports[at % 2]) for at in range(options.streams)))
        seconds = time.monotonic() - begun
    p50, p99 = percentiles(delays)
    facts = {"streams": options.streams, "whole": whole, "seconds": round(seconds, 2)}
    return {**facts, "alone_seconds": PIECES * PAUSE, "delay_p50_ms": p50, "delay_p99_ms": p99}


async def affinity(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    fleet = SleepingFleet(place, options.workers[0], 2, 2, options.seconds)
    chance = random.Random(options.seed)
    names = [name for name in MODELS if name != TEXT]
    weights = [1 / (at + 1) for at in range(len(names))]
    warm: list[bool] = []
    jobs: set[asyncio.Task[None]] = set()

    async def one(port: int, name: str) -> None:
        found = await ask(session, port, name, name)
        warm.append(found["warm"])

    async with fleet.running() as session:
        slots = 2 * options.workers[0]
        mean = options.seconds / (options.load * slots)
        for number in range(options.rounds):
            port = fleet.gateways[number % 2].port
            name = chance.choices(names, weights)[0]
            jobs.add(asyncio.create_task(one(port, name)))
            await asyncio.sleep(chance.expovariate(1 / mean))
        await asyncio.gather(*jobs)
    settled = warm[len(warm) // 4 :]  # without the first jobs, whose models nobody has
    best = sum(sorted(weights)[-slots:]) / sum(weights)
    return {
        "jobs": len(warm),
        "jobs_that_met_their_model": round(sum(settled) / len(settled), 4),
        "with_one_fixed_model_a_slot": round(best, 4),
        "load": options.load,
    }


async def scaling(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    found: dict[int, float] = {}
    for count in options.workers:
        here = place / str(count)
        here.mkdir()
        fleet = SleepingFleet(here, count, 2, 1, options.seconds)
        async with fleet.running() as session:
            ports = [each.port for each in fleet.gateways]
            found[count] = await rate(session, ports, count, options.rounds * options.seconds)
    linear = {count: round(each * options.seconds / count, 3) for count, each in found.items()}
    return {"per_second": found, "of_what_the_engines_allow": linear}


MEASURES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (latency, throughput, streams, affinity, scaling)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=[*MEASURES, "workers"])
    parser.add_argument("--workers", default="8")
    parser.add_argument("--seconds", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--load", type=float, default=0.4, help="share of the slots at work")
    parser.add_argument("--streams", type=int, default=200, help="texts at once")
    parser.add_argument("--seed", type=int, default=1)
    for name, usual in (("nats", ""), ("ports", ""), ("first", 0), ("slots", 1)):
        parser.add_argument(f"--{name}", type=type(usual), default=usual, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the children end too
    options.workers = [int(one) for one in options.workers.split(",")]
    if options.measure == "workers":
        asyncio.run(run_workers(options))
    place = Path(tempfile.mkdtemp(prefix="gateway-", dir=os.environ.get("TMPDIR")))
    try:
        result = asyncio.run(MEASURES[options.measure](options, place))
        lines = [f"{name:28}{value}" for name, value in result.items()]
        print(json.dumps(result) if options.json else "\n".join(lines))
    finally:
        for log in place.rglob("*.log"):
            if "Traceback" in log.read_text(errors="replace"):
                print(f"{log.name}: {log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

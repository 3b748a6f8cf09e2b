"""Kill workers, gateways and the NATS server of a fleet at random while clients make pictures.

    python -m benchmarks.jobs [--workers 8] [--gateways 2] [--jobs 2000] [--clients 50]
        [--every SECONDS] [--calm] [--seed N] [--directory DIR] [--json]

Workers are ``aimage serve --join`` with examples/tiny, gateways ``aimage gateway``, each a process.
About every ``--every`` seconds one of them or the server is killed (SIGKILL) and started again.
A client repeats a request with its idempotency key, at any gateway, until it has a response. Then

- no job may be left on the queue, and none given up,
- each job must have been answered with 200, and again with the same bytes for its key,
- the facts in its picture must be its own prompt and seed,
- its pixels must be those of ``aimage run --local``.

With ``--calm`` nothing is killed, and the same jobs are also sent to the workers directly, for the
throughput and the latency that the fleet adds. Needs nats-server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

ROOT = Path(__file__).parents[1]
PICTURES = "/v1/images/generations"
SEEDS = 10  # different pictures
PATIENCE = 300.0  # seconds for one job
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@dataclass
class Program:
    """A process that can be killed and started again; ``port`` is where it listens."""

    name: str
    port: int
    command: list[str]
    place: Path
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.place / f"{self.name}.log").open("ab")
        self.child = subprocess.Popen(
            self.command, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True
        )

    def kill(self) -> None:
        if self.child is not None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    async def answers(self) -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


@dataclass
class Result:
    """The outcome: what must be zero first."""

    lost: int = 0
    foreign: int = 0
    different: int = 0
    repeated_otherwise: int = 0
    given_up: int = 0
    left: int = 0
    jobs: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    seconds: float = 0.0
    per_second: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    direct_per_second: float = 0.0
    direct_p50_ms: float = 0.0


class JobFleet:
    """The processes of a fleet."""

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        nats, self.place = free_port(), place
        aimage = [sys.executable, "-m", "clowder_aimage.cli"]
        self.url = f"nats://127.0.0.1:{nats}"
        server = ["nats-server", "-a", "127.0.0.1", "-p", str(nats), "-js", "-sd", f"{place}/js"]
        self.nats = Program("nats", nats, server, place)
        # The keys of the fleet are in the configuration of this user.
        ENVIRONMENT["XDG_CONFIG_HOME"] = str(place / "config")
        store = ["--store", str(place / "store")]
        subprocess.run(
            [*aimage, "create", "-q", "tiny", str(ROOT / "examples/tiny"), *store],
            env=ENVIRONMENT,
            check=True,
            stdout=subprocess.DEVNULL,
        )

        def server_of(name: str, *words: str) -> Program:
            port = free_port()
            command = [*aimage, *words, "--addr", f"127.0.0.1:{port}"]
            return Program(name, port, command, place)

        self.workers = [
            server_of(f"w{at}", "serve", "--join", self.url, "--worker-name", f"w{at}", *store)
            for at in range(options.workers)
        ]
        self.gateways = [
            server_of(f"g{at}", "gateway", "--nats", self.url) for at in range(options.gateways)
        ]
        self.init = [*aimage, "fleet", "init", "--nats", self.url]

    def run(self, number: int) -> bytes:
        """Return the picture of a job as ``aimage run`` makes it."""
        facts, file = wish(number), self.place / "run.png"
        options = ["--local", "-q", "-o", str(file), "--store", str(self.place / "store")]
        for name in ("seed", "width", "height", "steps"):
            options += [f"--{name}", str(facts[name])]
        command = [sys.executable, "-m", "clowder_aimage.cli", "run", "tiny", facts["prompt"]]
        subprocess.run([*command, *options], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        found = file.read_bytes()
        file.unlink()
        return found

    async def start(self) -> None:
        self.nats.start()
        await self.nats.answers()
        subprocess.run(self.init, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        for each in (*self.workers, *self.gateways):
            each.start()
        for each in (*self.workers, *self.gateways):
            await asyncio.wait_for(each.answers(), 240)

    def end(self) -> None:
        for each in (*self.workers, *self.gateways, self.nats):
            each.kill()


def wish(number: int) -> dict[str, Any]:
    size = {"width": 64, "height": 64, "steps": 4}
    return {"model": "tiny", "prompt": f"job {number % SEEDS}", "seed": number % SEEDS, **size}


async def ask(session: aiohttp.ClientSession, port: int, number: int, key: str) -> bytes | None:
    """Return the picture of a job; None if it must be asked for again."""
    url, headers = f"http://127.0.0.1:{port}{PICTURES}", {"Idempotency-Key": key} if key else {}
    try:
        async with session.post(url, json=wish(number), headers=headers) as answer:
            value = await answer.json()
            if answer.status in (502, 503, 504):
                return None
            if answer.status != 200:
                raise RuntimeError(f"job {number}: {answer.status} {value}")
            return base64.b64decode(value["data"][0]["b64_json"])
    except (aiohttp.ClientError, ConnectionError, ValueError):
        return None


async def measure(options: argparse.Namespace, place: Path) -> Result:
    fleet, result, chance = JobFleet(options, place), Result(), random.Random(options.seed)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        await fleet.start()
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            known = [pixels(fleet.run(at)) for at in range(min(SEEDS, options.jobs))]
            await ready(session, fleet, options.workers)
            killing, over = None, asyncio.Event()
            if not options.calm:
                killing = asyncio.create_task(kill(fleet, result, chance, options.every, over))
            await work(session, fleet, options, result, known)
            if killing is not None:
                over.set()
                await killing  # which starts again what it has killed
            if options.calm:
                await work_directly(session, fleet, options, result)
            else:
                for each in (fleet.nats, *fleet.workers, *fleet.gateways):
                    await asyncio.wait_for(each.answers(), 240)
            await ready(session, fleet, 1)
            end = time.monotonic() + 60
            while (status := await fleet_status(session, fleet))["jobs"]:
                if time.monotonic() > end:  # longer than any acknowledgement may be missing
                    break
                await asyncio.sleep(0.5)
            result.given_up = status["given_up"]
            result.left = status["jobs"]
    finally:
        fleet.end()
    return result


async def fleet_status(session: aiohttp.ClientSession, fleet: JobFleet) -> Any:
    async with session.get(f"http://127.0.0.1:{fleet.gateways[0].port}/v1/fleet") as answer:
        return await answer.json() if answer.status == 200 else {"workers": []}


async def ready(session: aiohttp.ClientSession, fleet: JobFleet, count: int) -> None:
    async with asyncio.timeout(240):
        while len((await fleet_status(session, fleet))["workers"]) < count:
            await asyncio.sleep(0.2)


async def kill(
    fleet: JobFleet, result: Result, chance: random.Random, every: float, over: asyncio.Event
) -> None:
    """Kill a program now and then, and start it again, until all jobs are over."""
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every * chance.uniform(0.5, 1.5)):
                await over.wait()
                return
        kind = chance.choices(("workers", "gateways", "nats"), (5, 3, 2))[0]
        found = fleet.nats if kind == "nats" else chance.choice(getattr(fleet, kind))
        result.kills[kind] = result.kills.get(kind, 0) + 1
        found.kill()
        await asyncio.sleep(chance.uniform(0, 1))
        found.start()


async def work(
    session: aiohttp.ClientSession,
    fleet: JobFleet,
    options: argparse.Namespace,
    result: Result,
    known: list[bytes],
) -> None:
    numbers = iter(range(options.jobs))
    answers: dict[int, bytes] = {}
    times: list[float] = []

    async def client() -> None:
        for number in numbers:
            begun = time.monotonic()
            key = f"{options.seed}-{number}"
            while True:
                port = random.choice(fleet.gateways).port
                found = await ask(session, port, number, key)
                if found is not None:
                    break
                result.retries += 1
                await asyncio.sleep(0.2)
            answers[number] = found
            times.append(time.monotonic() - begun)

    begun = time.monotonic()
    await asyncio.gather(*(client() for _ in range(options.clients)))
    result.seconds, result.jobs = time.monotonic() - begun, len(answers)
    result.per_second = result.jobs / result.seconds
    result.p50_ms, result.p99_ms = percentiles(times)
    result.lost = options.jobs - len(answers)
    for number, data in answers.items():
        facts = Image.open(io.BytesIO(data)).text["aimage"]  # type: ignore[attr-defined]
        wanted = wish(number)
        result.foreign += any(json.loads(facts)[key] != wanted[key] for key in ("prompt", "seed"))
        result.different += pixels(data) != known[number % SEEDS]
    if options.calm:
        return
    for number in random.Random(1).sample(sorted(answers), min(20, len(answers))):
        again = None
        while again is None:
            port = random.choice(fleet.gateways).port
            again = await ask(session, port, number, f"{options.seed}-{number}")
            await asyncio.sleep(0 if again else 0.2)
        result.repeated_otherwise += again != answers[number]


async def work_directly(
    session: aiohttp.ClientSession, fleet: JobFleet, options: argparse.Namespace, result: Result
) -> None:
    """Send the same jobs to the workers, each of which has its share of the clients."""
    numbers = iter(range(options.jobs))
    times: list[float] = []

    async def client(port: int) -> None:
        for number in numbers:
            begun = time.monotonic()
            while await ask(session, port, number, "") is None:
                await asyncio.sleep(0.02)
            times.append(time.monotonic() - begun)

    begun = time.monotonic()
    count = len(fleet.workers)
    ports = [fleet.workers[at % count].port for at in range(options.clients)]
    await asyncio.gather(*(client(port) for port in ports))
    result.direct_per_second = options.jobs / (time.monotonic() - begun)
    result.direct_p50_ms, _ = percentiles(times)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    found = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else [0.0] * 99
    return round(found[49] * 1000, 1), round(found[98] * 1000, 1)


def pixels(data: bytes) -> bytes:
    return hashlib.sha256(Image.open(io.BytesIO(data)).tobytes()).digest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("workers", 8), ("gateways", 2), ("jobs", 2000), ("clients", 50)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--every", type=float, default=4.0)
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the children end too
    place = Path(tempfile.mkdtemp(prefix="jobs-", dir=options.directory))
    try:
        result = asyncio.run(measure(options, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if options.json:
        print(json.dumps(vars(result)))
    else:
        for name, value in vars(result).items():
            print(f"{name:20}{value}")
    bad = (result.lost, result.foreign, result.different, result.repeated_otherwise)
    return int(any((*bad, result.given_up, result.left)))


if __name__ == "__main__":
    sys.exit(main())

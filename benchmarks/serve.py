"""Measure the overhead of a worker per picture: ``python -m benchmarks.serve``.

The shapes model makes pictures of 8 steps: with the bare pipeline in a separate process, through
the engine, over HTTP in one response, and as a stream. Each way loads the model once; rounds are
interleaved, so that load on the machine affects all of them. The goal is that HTTP takes at most
1.05 of the bare pipeline. For streams, the time to the first byte of progress after the request
leaves the queue is measured as well (goal: 100 ms).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from clowder_aimage.create import create
from clowder_aimage.engine.admission import EngineLimits
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions

MODEL = Path(__file__).resolve().parents[1] / "examples" / "shapes" / "model"
NAME = Reference.parse("shapes")
PROMPT = "a green triangle left of a yellow circle"
STEPS = 8
BARE = "pipeline"
_CHILD = """
import sys, time
from pathlib import Path
from clowder_aimage.generate import load
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.picture import encode_picture
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.pipeline import Image
from clowder_aimage.oci import Reference
store = LayeredStore([Path(sys.argv[1])])
with store.lease():
    model = load(store, read_aimage(store, Reference.parse("shapes")))
    for line in sys.stdin:
        seed, side = map(int, line.split())
        request = GenerateRequest.of(sys.argv[2], width=side, height=side, steps=8, seed=seed)
        begun = time.perf_counter()
        for event in model.generate(request):
            if isinstance(event, Image):
                encode_picture(event.pixels, {"seed": seed})
        print(time.perf_counter() - begun, flush=True)
"""


class Bare:
    """The pipeline in a separate process, as in the worker."""

    def __init__(self, store: Path) -> None:
        command = [sys.executable, "-c", _CHILD, str(store), PROMPT]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, seed: int, side: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seed} {side}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Server:
    """``aimage serve`` on a free port."""

    def __init__(self, store: Path) -> None:
        command = [str(Path(sys.executable).with_name("aimage")), "serve", "--store", str(store)]
        self._process = subprocess.Popen(
            [*command, "--addr", "127.0.0.1:0", "--json", "-q", "--log-level", "error"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = json.loads(self._process.stdout.readline())["urls"][0]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


async def by_engine(engine: Engine, seed: int, side: int) -> float:
    request = GenerateRequest.of(PROMPT, width=side, height=side, steps=STEPS, seed=seed)
    begun = time.perf_counter()
    async with contextlib.aclosing(engine.generate(NAME, lambda _: request)) as events:
        async for _ in events:
            pass
    return time.perf_counter() - begun


async def by_http(
    session: aiohttp.ClientSession, url: str, seed: int, side: int, **more: Any
) -> tuple[float, float]:
    """Return the seconds to the last byte, and to the first byte of the body."""
    body = {"model": "shapes", "prompt": PROMPT, "seed": seed, "steps": STEPS}
    body |= {"size": f"{side}x{side}", **more}
    begun = time.perf_counter()
    async with session.post(f"{url}/v1/images/generations", json=body) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        first = time.perf_counter() - begun
        await answer.content.read()
    return time.perf_counter() - begun, first


async def measure(store: Path, rounds: int, side: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    layout, metrics = LayeredStore([store]), Metrics()
    transfers = TransferQueue(layout, ClientOptions(), metrics, EventLog())
    engine = Engine(layout, transfers, EngineLimits(), metrics)
    bare, server = Bare(store), Server(store)
    try:
        async with aiohttp.ClientSession() as session:
            for seed in range(-2, rounds):
                took = {BARE: bare(seed + 2, side)}
                took["engine"] = await by_engine(engine, seed + 2, side)
                took["HTTP"], _ = await by_http(session, server.url, seed + 2, side)
                took["HTTP, stream"], took["first byte of a stream"] = await by_http(
                    session, server.url, seed + 2, side, stream=True
                )
                if seed >= 0:  # the first rounds load and warm up
                    for way, seconds in took.items():
                        found.setdefault(way, []).append(seconds)
    finally:
        bare.close()
        server.close()
        await engine.close(1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--side", type=int, default=256, help="pixels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        create(LayeredStore([store]), NAME, MODEL)
        found = asyncio.run(measure(store, options.rounds, options.side))
    base = statistics.median(found[BARE])
    print("| way | ms, median | ratio |\n|---|---|---|")
    for way, seconds in found.items():
        median = statistics.median(seconds)
        print(f"| {way} | {median * 1000:.1f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()

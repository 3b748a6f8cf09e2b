"""A fleet for minutes, with a hostile worker and a hostile client beside; each part a process.

``AIMAGE_SOAK_SECONDS`` is the time of the attack, 600 by default. What was measured is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.worker_registry import read_workers
from clowder_aimage.http.local_request import Request
from tests.conftest import ROOT
from tests.fleet.attack import ACCESS, FLEET, HOSTILE, PASSWORD, attacked_server
from tests.fleet.fleet_run import FleetRun, Nats, ScriptedRole, prompt_as_picture
from tests.process import end, spawn
from tests.wait import PATIENCE, until_async

SECONDS = float(os.environ.get("AIMAGE_SOAK_SECONDS", "600"))
# Without an attack, and seconds that results are kept.
QUIET, KEEP = min(60.0, SECONDS), 20.0
GOOD_TOKEN, EVIL_TOKEN = "good-token-of-a-client", "evil-token-of-a-client"
# Seconds of work for a picture, and clients that ask for one after another.
WORK, CLIENTS = 0.1, 3
# Seconds after which a client gives a request up.
GIVEN_UP = 60.0
# How much longer a good client may wait under attack.
FACTOR = 3.0


@dataclass
class Measured:
    """The times of answers to good clients, what was wrong, and the attacks meanwhile."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    given_up: int = 0
    attacks: list[dict[str, int]] = field(default_factory=list)

    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]

    def report(self, phase: str) -> None:
        """Print what was measured in a phase."""
        figures = {"answers": len(self.seconds), "p99": round(self.p99(), 3)}
        figures["given up"] = self.given_up
        said = {"wrong": self.wrong[:5], "refused": self.refused[:5], "attacks": self.attacks}
        sys.stdout.write(f"{phase}: {json.dumps(figures | said)}\n")


def run_part(fleet: FleetRun, worker: str, pipe: Connection) -> None:
    """Run a worker, or the gateway if it has no name, until the pipe is closed."""
    # The terminal's Ctrl-C goes to all processes: the test ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def run() -> None:
        tokens = {GOOD_TOKEN: "infer", EVIL_TOKEN: "infer"}
        role = ScriptedRole(draw)
        part = fleet.worker(worker, role, max_models=2) if worker else fleet.gateway(tokens=tokens)
        async with part as running:
            pipe.send("" if worker else running)
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def running(fleet: FleetRun, worker: str = "") -> AsyncIterator[str]:
    """Run a part of a fleet in a process of its own; yield the URL of a gateway."""
    # Neither a session nor a child process can be sent to another process.
    fleet = replace(fleet, nats=Nats(fleet.nats.directory, fleet.nats.port))
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    part = processes.Process(target=run_part, args=(fleet, worker, theirs), daemon=True)
    part.start()
    theirs.close()
    try:
        yield str(await asyncio.to_thread(ours.recv))
        assert part.is_alive(), f"{worker or 'the gateway'} ended: {part.exitcode}"
    finally:
        ours.close()
        await asyncio.to_thread(part.join, PATIENCE)
        part.kill()


async def draw(request: Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(WORK)
    return await prompt_as_picture(request, body)


async def measure(fleet: FleetRun, url: str, seconds: float) -> Measured:
    """Ask for pictures for some seconds, as good clients."""
    measured, clock = Measured(), asyncio.get_running_loop().time
    end_time = clock() + seconds

    async def ask(client: int) -> None:
        number = 0
        while clock() < end_time:
            prompt, begun = f"cat {client} {number}", clock()
            number += 1
            try:
                async with asyncio.timeout(GIVEN_UP):
                    status, answer = await fleet.ask(url, prompt, seed=number)
            except TimeoutError:
                measured.given_up += 1
                continue
            finally:
                measured.seconds.append(clock() - begun)
            if status != 200:
                measured.refused.append(f"{prompt}: {status} {str(answer)[:200]}")
            elif answer["data"][0]["b64_json"] != f"{prompt} {number}":
                measured.wrong.append(f"{prompt}: {str(answer)[:200]}")

    await asyncio.gather(*map(ask, range(CLIENTS)))
    return measured


async def measure_attacked(fleet: FleetRun, url: str, seconds: float, *words: str) -> Measured:
    """Measure during an attack. With "delay" jobs wait until they are delivered again."""
    server = fleet.nats.url.replace("nats://", f"nats://{HOSTILE}:{PASSWORD}@")
    async with attacking(
        ["tests.fleet.hostile_worker", server, FLEET, HOSTILE, str(seconds), *words],
        ["tests.fleet.hostile_client", url, EVIL_TOKEN, str(seconds)],
    ) as said:
        # Until the programs have begun, and before they end.
        margin = min(5.0, seconds / 8)
        await asyncio.sleep(margin)
        measured = await measure(fleet, url, seconds - 2 * margin)
    measured.attacks = [json.loads(line) for line in said if line]
    return measured


@contextlib.asynccontextmanager
async def attacking(*commands: list[str]) -> AsyncIterator[list[str]]:
    """Run programs that attack; their outputs are added when they have ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    # They would be other machines: they get only the time that the fleet leaves.
    start = ["nice", "-n", "19", sys.executable, "-m"]
    children = [spawn([*start, *command], **pipes) for command in commands]
    said: list[str] = []
    try:
        yield said
        for child in children:
            said.append((await asyncio.to_thread(child.communicate, None, 60))[0])
    finally:
        for child in children:
            end(child)


async def read_bytes(link: FleetLink) -> dict[str, int]:
    """Return the bytes in each stream that jobs use."""
    names = link.names
    streams = (names.jobs, names.bodies, names.logs, names.marks)
    return {name: (await link.streams.stream_info(name)).state.bytes for name in streams}


@pytest.mark.slow
@pytest.mark.integration
def test_good_clients_are_served_while_others_attack(
    play: Callable[..., None], tmp_path: Path
) -> None:
    async def scene(fleet: FleetRun) -> None:
        await fleet.make(keep=KEEP)
        watching = fleet.operator()
        async with (
            running(fleet) as url,
            running(fleet, "w1"),
            running(fleet, "w2"),
            watching.open(),
        ):
            await watching.wait_until_ready(PATIENCE)
            fleet.session.headers["Authorization"] = f"Bearer {GOOD_TOKEN}"
            await fleet.know(url, 2)
            quiet = await measure(fleet, url, QUIET)
            quiet.report("quiet")
            attack = await measure_attacked(fleet, url, SECONDS)
            attack.report("attack")
            delaying = await measure_attacked(fleet, url, SECONDS / 3, "delay")
            delaying.report("delaying")
            stored = await read_bytes(watching)
            sys.stdout.write(f"bytes: {json.dumps(stored)}\n")

            async def is_cleared() -> bool:
                return not any((await read_bytes(watching)).values())

            await until_async(is_cleared, "the streams to be as before")
            assert not any(phase.wrong for phase in (quiet, attack, delaying))
            assert not any((quiet.refused, attack.refused, quiet.given_up, attack.given_up))
            assert attack.p99() <= FACTOR * quiet.p99()
            statuses = {each.id: each for each in (await read_workers(watching)).list_statuses()}
            assert not any(statuses[worker].is_draining for worker in ("w1", "w2"))

    with attacked_server(tmp_path) as own:
        play(scene, own, patience=2 * SECONDS + QUIET + 300, **ACCESS)

"""Scenes of a fleet while a worker with the shipped access to NATS attacks it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from clowder_aimage.fleet.link import GATEWAY, OPERATOR, WORKER
from clowder_aimage.fleet.worker_registry import give_order
from tests.fleet.fleet_run import FleetRun, ScriptedRole, prompt_as_picture
from tests.fleet.hostile_worker import EVIL, HostileWorker
from tests.fleet.nats_config import shipped, worker_account
from tests.fleet.test_fleet_security import server
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]
PASSWORD = "password"
GOOD, HOSTILE = ("good-1", "good-2"), "hostile"


@contextlib.asynccontextmanager
async def attacked(fleet: FleetRun, *, steals: bool = True) -> AsyncIterator[HostileWorker]:
    """Run a hostile worker beside a scene."""
    (url,) = fleet.access_of(WORKER, HOSTILE).servers
    hostile = HostileWorker(url, fleet.access_of(WORKER).names, HOSTILE, GOOD)
    async with hostile.connected():
        attacking = asyncio.create_task(hostile.run(steals=steals))
        try:
            yield hostile
        finally:
            assert not attacking.done(), attacking
            attacking.cancel()


@pytest.fixture
def play_attacked(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that plays a scene on a server with three workers' accounts."""
    for kind in (OPERATOR, GATEWAY, WORKER):
        monkeypatch.setenv(f"NATS_{kind.upper()}_PASSWORD", PASSWORD)
    text = shipped(tmp_path / "js", *map(worker_account, (*GOOD, HOSTILE)))

    def run(scene: object) -> None:
        passwords = dict.fromkeys((OPERATOR, GATEWAY, WORKER), PASSWORD)
        with server(tmp_path, text) as own:
            play(scene, own, name="aimage", passwords=passwords)

    return run


def test_jobs_are_served_by_workers_that_got_them(play_attacked: Callable[..., None]) -> None:
    """No order is followed, no response is another's, and the streams are as they were."""

    async def scene(fleet: FleetRun) -> None:
        roles = {name: ScriptedRole(prompt_as_picture) for name in GOOD}
        async with (
            fleet.gateway() as url,
            fleet.worker(GOOD[0], roles[GOOD[0]]) as first,
            fleet.worker(GOOD[1], roles[GOOD[1]]) as second,
        ):
            await fleet.know(url, 2)
            watching = fleet.operator()
            async with watching.open():
                await watching.wait_until_ready(PATIENCE)
                async with attacked(fleet) as hostile:
                    await until_async(lambda: hostile.tried.get("stolen", 0) > 0, "all attacks")
                    for number in range(10):
                        wished = asyncio.gather(
                            *(
                                fleet.ask(url, f"cat {number} {each}", seed=number)
                                for each in range(4)
                            )
                        )
                        for each, (status, answer) in enumerate(await wished):
                            assert status == 200, answer
                            text = answer["data"][0]["b64_json"]
                            assert text == f"cat {number} {each} {number}"
                    known = {w["id"]: w for w in (await fleet.status(url))["workers"]}
                    assert not any(known[name]["is_draining"] for name in GOOD)
                    assert [worker.takes_jobs for worker in (first, second)] == [True, True]
                    drained = await give_order(watching, GOOD[0], "drain")
                    assert drained["is_draining"] and drained["id"] == GOOD[0]
                assert EVIL not in {prompt for role in roles.values() for prompt in role.served}
                for name in (watching.names.jobs, watching.names.marks, watching.names.dead):
                    assert (await watching.streams.stream_info(name)).config.name == name
                consumers = await watching.streams.consumers_info(watching.names.jobs)
                assert "squat" not in {consumer.name for consumer in consumers}
                assert not await watching.streams.consumers_info(f"KV_{watching.names.workers}")

    play_attacked(scene)

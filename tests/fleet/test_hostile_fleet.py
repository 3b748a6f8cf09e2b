"""Scenes of a fleet while a worker with the shipped access to NATS attacks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.fleet.worker_registry import give_order
from tests.fleet import (
    test_fleet_cancelled,
    test_fleet_jobs,
    test_fleet_turns,
    test_job_log,
    test_worker_call,
)
from tests.fleet.attack import ACCESS, attacked, attacked_server
from tests.fleet.conftest import VICTIMS, Play
from tests.fleet.fleet_run import FleetRun, ScriptedRole, prompt_as_picture
from tests.fleet.hostile_worker import EVIL
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
# Tests that hold while a hostile worker delays no jobs.
SCENES: tuple[Callable[[Play], None], ...] = (
    test_fleet_jobs.test_a_job_is_answered_by_a_worker,
    test_fleet_jobs.test_a_key_is_one_job_at_all_gateways,
    test_fleet_cancelled.test_a_client_that_leaves_cancels_its_job,
    test_fleet_turns.test_a_drained_worker_ends_its_work_and_takes_no_more,
    test_fleet_jobs.test_a_large_request_may_be_repeated_at_once,
    test_job_log.test_the_client_gets_the_response_of_the_attempt_that_began_last,
    test_worker_call.test_a_response_may_be_larger_than_a_message,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_holds(scene: Callable[[Play], None], play_attacked: Play) -> None:
    scene(play_attacked)


def test_jobs_are_served_by_workers_that_got_them(play: Play, tmp_path: Path) -> None:
    """No order is followed, no response is another's, and the streams are as they were."""

    async def scene(fleet: FleetRun) -> None:
        roles = {name: ScriptedRole(prompt_as_picture) for name in VICTIMS}
        async with (
            fleet.gateway() as url,
            fleet.worker("w1", roles["w1"]) as first,
            fleet.worker("w2", roles["w2"]) as second,
        ):
            await fleet.know(url, 2)
            watching = fleet.operator()
            async with watching.open():
                await watching.wait_until_ready(PATIENCE)
                async with attacked(fleet, *VICTIMS) as hostile:
                    await until_async(lambda: hostile.tried.get("stolen", 0) > 0, "all attacks")
                    for number in range(10):
                        await ask_four(fleet, url, number)
                    known = {w["id"]: w for w in (await fleet.status(url))["workers"]}
                    assert not any(known[name]["is_draining"] for name in VICTIMS)
                    assert [worker.takes_jobs for worker in (first, second)] == [True, True]
                    drained = await give_order(watching, "w1", "drain")
                    assert drained["is_draining"] and drained["id"] == "w1"
                assert EVIL not in {prompt for role in roles.values() for prompt in role.served}
                names, streams = watching.names, watching.streams
                for name in (names.jobs, names.marks, names.dead):
                    assert (await streams.stream_info(name)).config.name == name
                consumers = await streams.consumers_info(names.jobs)
                assert "squat" not in {consumer.name for consumer in consumers}
                assert not await streams.consumers_info(f"KV_{names.workers}")

    with attacked_server(tmp_path) as own:
        play(scene, own, **ACCESS)


async def ask_four(fleet: FleetRun, url: str, number: int) -> None:
    prompts = [f"cat {number} {each}" for each in range(4)]
    answers = await asyncio.gather(*(fleet.ask(url, text, seed=number) for text in prompts))
    for prompt, (status, answer) in zip(prompts, answers, strict=True):
        assert status == 200, answer
        assert answer["data"][0]["b64_json"] == f"{prompt} {number}"

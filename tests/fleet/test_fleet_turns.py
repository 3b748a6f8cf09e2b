"""The order of jobs, and workers that stop or are drained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.fleet.gateway import gateway
from clowder_aimage.fleet.gateway import status as fleet_status
from clowder_aimage.fleet.name import BATCH
from clowder_aimage.fleet.worker_registry import give_order
from clowder_aimage.http.local_request import Request
from tests.fleet.fleet_run import (
    FleetRun,
    ScriptedRole,
    held_role,
    prompt_as_picture,
    run_batch,
)
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


def test_a_drained_worker_ends_its_work_and_takes_no_more(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        begun = asyncio.Event()

        async def slow(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            begun.set()
            await asyncio.sleep(0.3)
            return await prompt_as_picture(request, body)

        first, other = ScriptedRole(slow), ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("first", first):
            await fleet.know(url, 1)
            link = fleet.operator()
            async with link.open():
                await link.wait_until_ready(PATIENCE)
                asked = asyncio.create_task(fleet.ask(url, "a", seed=1))
                await begun.wait()
                status = await give_order(link, "first", "drain")
                assert status["is_draining"] and status["running"] == 1
                async with fleet.worker("other", other):
                    await fleet.know(url, 2)
                    assert (await asked)[1]["data"][0]["b64_json"] == "a 1"
                    for _ in range(3):
                        assert (await fleet.ask(url, "b"))[0] == 200
                assert (first.served, other.served) == (["a"], ["b"] * 3)
                assert not (await give_order(link, "first", "resume"))["is_draining"]
                assert (await fleet.ask(url, "c"))[0] == 200

    play(scene)


def test_a_worker_that_stops_gives_its_job_back(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        begun = asyncio.Event()

        async def endless(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            begun.set()
            await asyncio.sleep(2 * PATIENCE)
            raise AssertionError

        other = ScriptedRole(prompt_as_picture)
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(fleet.gateway())
            stopping = AsyncExitStack()
            worker = await stopping.enter_async_context(
                fleet.worker("first", ScriptedRole(endless))
            )
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "a", seed=3))
            await begun.wait()
            await worker.drain(0.05, asyncio.Event())
            await stopping.aclose()
            await stack.enter_async_context(fleet.worker("other", other))
            assert (await asked)[1]["data"][0]["b64_json"] == "a 3"

    play(scene)


def test_batches_wait_for_others_and_callers_are_equal(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        async def slow(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.03)
            return await prompt_as_picture(request, body)

        role = ScriptedRole(slow)
        tokens = {"a" * 20: "infer", "b" * 20: "infer"}
        async with fleet.gateway(tokens=tokens) as url, fleet.worker("w1", role):
            many, few = ({"Authorization": f"Bearer {token}"} for token in tokens)
            fleet.session.headers.update(many)
            await fleet.know(url, 1)
            batch = {**many, "Aimage-Priority": BATCH}
            asked = [fleet.ask(url, "batch", headers=batch) for _ in range(10)]
            asked += [fleet.ask(url, "many", headers=many) for _ in range(30)]
            tasks = [asyncio.create_task(each) for each in asked]
            await until_async(lambda: len(role.served) > 5)
            tasks += [asyncio.create_task(fleet.ask(url, "few", headers=few)) for _ in range(3)]
            found = await asyncio.gather(*tasks)
            assert {status for status, _ in found} == {200}
            order = role.served
            last_few = max(at for at, each in enumerate(order) if each == "few")
            assert "many" in order[last_few:]
            assert order[-1] == "batch" or order[-5:].count("batch") >= 3

    play(scene)


def test_jobs_that_wait_in_gateways_are_counted(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_status, "INTERVAL", 0.05)

    async def scene(fleet: FleetRun) -> None:
        role, begun, go_on = held_role()
        async with (
            fleet.gateway() as first,
            fleet.gateway() as second,
            fleet.worker("w1", role, max_models=1),
        ):
            for url in (first, second):
                await fleet.know(url, 1)
            asked = [
                asyncio.create_task(fleet.ask(url, f"a {number}", seed=1))
                for number in range(gateway.MIN_WINDOW + 3)
                for url in (first, second)
            ]
            await begun.wait()

            async def is_counted() -> bool:
                one, other = await fleet.status(first), await fleet.status(second)
                waiting = one["waiting"]
                # Jobs that a worker has begun are still on the queue.
                return waiting == other["waiting"] > 0 and waiting + one["jobs"] == len(asked)

            await until_async(is_counted)
            go_on.set()
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}

            async def is_zero() -> bool:
                return (await fleet.status(first))["waiting"] == 0

            await until_async(is_zero)

    play(scene)


def test_a_batch_goes_on_at_another_gateway(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of the gateways and of the worker are days ahead of that of NATS."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 50 * 86400)

    async def scene(fleet: FleetRun) -> None:
        begun, may_go = asyncio.Event(), asyncio.Event()

        async def slow(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["prompt"] == "b":
                begun.set()
                await may_go.wait()
            return await prompt_as_picture(request, body)

        role = ScriptedRole(slow)
        async with AsyncExitStack() as stack, fleet.gateway() as other, fleet.worker("w1", role):
            first = await stack.enter_async_context(fleet.gateway())
            await fleet.know(first, 1)
            await fleet.know(other, 1)
            running = asyncio.create_task(run_batch(fleet, first, other, "a", "b", "c"))
            await begun.wait()
            await stack.aclose()  # the gateway that runs the batch
            may_go.set()
            assert await running == ["a", "b", "c"]
            assert sorted(role.served) == ["a", "b", "c"]
            async with fleet.session.get(f"{other}/v1/batches") as answer:
                (batch,) = (await answer.json())["data"]
            assert abs(batch["created_at"] - right()) < 60
            assert batch["expires_at"] == batch["created_at"] + 86400

    play(scene)

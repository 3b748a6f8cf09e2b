"""Jobs whose clients left, wherever they are then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.fleet.gateway import gateway
from clowder_aimage.fleet.job.envelope import JobEnvelope
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.http.local_request import Request
from tests.fleet.fleet_run import (
    FleetRun,
    ScriptedRole,
    no_jobs,
    prompt_as_picture,
)
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


def test_a_client_that_leaves_cancels_its_job(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        ended, begun = asyncio.Event(), asyncio.Event()

        async def endless(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            begun.set()
            try:
                await asyncio.sleep(2 * PATIENCE)
            finally:
                ended.set()
            raise AssertionError

        async with fleet.gateway() as url, fleet.worker("w1", ScriptedRole(endless)) as worker:
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "a cat"))
            waiting = asyncio.create_task(fleet.ask(url, "a dog"))
            await begun.wait()
            asked.cancel()
            waiting.cancel()
            await asyncio.wait_for(ended.wait(), PATIENCE)
            await until_async(lambda: not worker._tasks)
            await no_jobs(fleet, url)

    play(scene)


def test_a_job_that_is_cancelled_on_its_way_to_a_worker_is_not_served(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has its message, and has not read it."""

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        is_delivered, is_removed = asyncio.Event(), asyncio.Event()

        read = JobEnvelope.read

        async def read_late(envelope: JobEnvelope, link: FleetLink) -> FleetJob:
            is_delivered.set()
            await is_removed.wait()
            return await read(envelope, link)

        monkeypatch.setattr(JobEnvelope, "read", read_late)
        async with fleet.gateway() as url, fleet.worker("w1", role) as worker:
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "a cat"))
            await is_delivered.wait()
            asked.cancel()
            await no_jobs(fleet, url)
            await until_async(lambda: worker._cancelled)
            is_removed.set()
            await until_async(lambda: not worker._tasks)
            assert not role.served and worker.done == 0

    play(scene)


def test_a_job_that_is_cancelled_while_it_is_put_on_the_queue_leaves_it(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is stored, and the gateway does not know it yet."""

    async def scene(fleet: FleetRun) -> None:
        role, may_go_on, store = ScriptedRole(prompt_as_picture), asyncio.Event(), FleetLink.store

        async def store_late(link: FleetLink, *given: Any, **options: Any) -> int:
            number = await store(link, *given, **options)
            await may_go_on.wait()
            return number

        async with fleet.gateway(deadline=0.1) as url, fleet.worker("w1", role) as worker:
            await fleet.know(url, 1)
            worker.takes_jobs = False
            monkeypatch.setattr(FleetLink, "store", store_late)
            status, value = await fleet.ask(url, "a cat")
            assert (status, value["error"]["code"]) == (504, "deadline_exceeded")
            assert (await fleet.status(url))["jobs"] == 1
            may_go_on.set()
            await no_jobs(fleet, url)
            assert not role.served

    monkeypatch.setattr(gateway, "WITHDRAWN", 0.1)
    play(scene)

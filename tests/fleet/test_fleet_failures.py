"""Workers that fail, and jobs that are given up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.fleet import joined_worker
from clowder_aimage.fleet.gateway.job_queue import JobQueue, QueuedJob
from clowder_aimage.fleet.job import choice as job_choice
from clowder_aimage.fleet.job import run as job_run
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.http.api_error import NO_RETRY
from clowder_aimage.http.local_request import Request
from tests.fleet.attempt import build_begin
from tests.fleet.fleet_run import (
    PICTURES,
    FleetRun,
    ScriptedRole,
    prompt_as_picture,
)
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


async def broken(request: Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no memory"}}, status=500)


async def _given_up(fleet: FleetRun) -> list[dict[str, Any]]:
    """Return the jobs that were given up."""
    link = fleet.operator()
    async with link.open():
        await link.wait_until_ready(PATIENCE)
        found = []
        info = await link.streams.stream_info(link.names.dead)
        for number in range(info.state.first_seq, info.state.last_seq + 1):
            message = await link.streams.get_msg(link.names.dead, seq=number)
            found.append(json.loads(message.data or b""))
        return found


def test_a_failing_worker_is_replaced_and_a_poisoned_job_given_up(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_run, "LATER", 0.05)
    monkeypatch.setattr(joined_worker, "SWEEP", 0.2)
    monkeypatch.setattr(job_choice, "ELSEWHERE", 0.2)
    monkeypatch.setattr(job_choice, "LEFT", 2.0)

    async def scene(fleet: FleetRun) -> None:
        bad, good = ScriptedRole(broken), ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("bad", bad) as worker:
            await fleet.know(url, 1)
            status, value = await fleet.ask(url, "poison")
            assert status == 500 and value == {"error": {"message": "no memory"}}
            assert len(bad.served) == job_run.ATTEMPTS
            await until_async(lambda: worker.failed == 1)
            (given_up,) = await _given_up(fleet)
            assert "4 attempts by bad: 500" in given_up["message"]
            assert "no memory" in given_up["message"] and given_up["path"] == PICTURES
            async with fleet.worker("good", good):
                await fleet.know(url, 2)
                for number in range(6):
                    assert (await fleet.ask(url, f"{number}", seed=1))[0] == 200
            assert len(good.served) == 6 and worker.done == 0
            async with fleet.session.get(f"{url}/metrics") as answer:
                shown = await answer.text()
            name = 'aimage_fleet_job_duration_seconds_count{outcome="%s",priority="interactive"} %d'
            assert name % ("failed", 1) in shown and name % ("done", 6) in shown
            counted = re.search(r"aimage_fleet_deliveries_total (\d+)", shown)
            again = re.search(r"aimage_fleet_retries_total (\d+)", shown)
            assert counted and again and int(counted[1]) - int(again[1]) == 7
            assert int(again[1]) >= job_run.ATTEMPTS - 1

    play(scene)


@pytest.mark.parametrize(("status", "again"), [(500, False), (504, False), (504, True)])
def test_a_job_that_would_fail_again_goes_to_no_other_worker(
    play: Play, status: int, again: bool
) -> None:
    """Its process died for it, or it was computed for too long."""

    async def fail(request: Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {} if again else dict([NO_RETRY])
        return web.json_response({"error": {"message": "no"}}, status=status, headers=headers)

    async def scene(fleet: FleetRun) -> None:
        one, two = ScriptedRole(fail), ScriptedRole(fail)
        async with fleet.gateway() as url, fleet.worker("one", one), fleet.worker("two", two):
            await fleet.know(url, 2)
            assert await fleet.ask(url, "poison") == (status, {"error": {"message": "no"}})
            assert len(one.served) + len(two.served) == 1

    play(scene)


def test_a_job_that_two_workers_cannot_serve_is_given_up(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_run, "LATER", 0.05)
    monkeypatch.setattr(joined_worker, "SWEEP", 0.2)
    for name in ("ELSEWHERE", "EVICT", "LEFT"):
        monkeypatch.setattr(job_choice, name, 0.1)

    async def scene(fleet: FleetRun) -> None:
        one, two = ScriptedRole(broken), ScriptedRole(broken)
        async with fleet.gateway() as url, fleet.worker("one", one), fleet.worker("two", two):
            await fleet.know(url, 2)
            assert (await fleet.ask(url, "poison"))[0] == 500
            assert one.served and two.served
            assert len(one.served) + len(two.served) == job_run.ATTEMPTS
            assert len(await _given_up(fleet)) == 1

    play(scene)


def test_a_job_that_cannot_be_read_ends_with_an_error(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a newer gateway, or one whose pieces have expired."""
    monkeypatch.setattr(joined_worker, "LATER", 0.05)
    monkeypatch.setattr(joined_worker, "SWEEP", 0.2)
    monkeypatch.setattr(FleetJob, "encode", lambda _: b'{"unknown": 1}')

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("w1", role) as worker:
            await fleet.know(url, 1)
            status, value = await fleet.ask(url, "a cat")
            assert status == 500 and value["error"]["code"] == "job_given_up"
            assert "no worker can read it" in value["error"]["message"]
            await until_async(lambda: not worker._tasks)
            assert not role.served and (await fleet.status(url))["jobs"] == 0

    play(scene)


def test_a_worker_that_vanished_too_often_is_named(play_quietly: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("w1", role):
            await fleet.know(url, 1)
            # As if the workers of four attempts had been killed in the middle
            link = fleet.gateway_link()
            async with link.open():
                await link.wait_until_ready(PATIENCE)
                key = {"headers": {"Idempotency-Key": "killed"}}
                told = asyncio.create_task(fleet.ask(url, "x", **key))
                assert (await told)[0] == 200
                streams, names = link.streams, link.names
                info = await streams.stream_info(names.logs, subjects_filter=">")
                job = next(iter(info.state.subjects or {})).rpartition(".")[2]
                operator = fleet.operator()
                async with operator.open():
                    await operator.wait_until_ready(PATIENCE)
                    for stream in names.logs, names.marks, names.dead:
                        await operator.streams.purge_stream(stream)
                ticket = JobTicket.generate(job)
                frame = build_begin("w5", ticket, 4, ("w2", "w3", "w4"))
                await link.store(names.build_mark_subject("w5", job), frame.data, frame.headers)
                role.served.clear()
                found = await _published_again(link, job, ticket, fleet, url)
                assert "w2, w3, w4, w5" in found and not role.served

    play_quietly(scene)


async def _published_again(
    link: FleetLink, job: str, ticket: JobTicket, fleet: FleetRun, url: str
) -> str:
    """Publish a job with the log of ``job``; return the reason why it was given up."""
    digest = next(iter((await fleet.status(url))["workers"]))["models"]["tiny:latest"]
    body = {"model": "tiny", "prompt": "x", "seed": 1}
    again = FleetJob(job, PICTURES, "infer", "me", "tiny", "tiny:latest", digest, fields=body)
    await JobQueue(link, lambda _: True).put(QueuedJob(again, ticket, publications=1))

    async def is_dead() -> bool:
        return (await fleet.status(url))["given_up"] == 1

    await until_async(is_dead)
    _, last = (await link.read_marks(job))[-1]
    return str(json.loads(last.data)["message"])

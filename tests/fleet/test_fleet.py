"""Gateways and workers on a NATS server, with workers whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from clowder_aimage.api.answer_stream import NdjsonStream
from clowder_aimage.errors import AImageError
from clowder_aimage.fleet import joined_worker
from clowder_aimage.fleet import link as fleet_link
from clowder_aimage.fleet.gateway import gateway, response_relay
from clowder_aimage.fleet.gateway import status as fleet_status
from clowder_aimage.fleet.gateway.continuation import NDJSON, SSE
from clowder_aimage.fleet.gateway.job_queue import JobQueue, QueuedJob
from clowder_aimage.fleet.job import choice as job_choice
from clowder_aimage.fleet.job import reader as job_reader
from clowder_aimage.fleet.job import run as job_run
from clowder_aimage.fleet.job.envelope import JOB, TICKET, JobEnvelope
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import BATCH, GATEWAY, OPERATOR, WORKER
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import give_order
from clowder_aimage.http.api_error import NO_RETRY
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.response_writer import ResponseWriter
from clowder_aimage.http.route import ADMIN, Role, Route, SharedRoute
from tests.fleet.attempt import begin, build_begin
from tests.fleet.fleet_run import (
    PICTURES,
    SHIPPED_WORKER,
    FleetRun,
    Nats,
    ScriptedRole,
    free_port,
    prompt_as_picture,
)
from tests.fleet.nats_config import shipped
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


def test_a_job_is_answered_by_a_worker(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("w1", role):
            await fleet.know(url, 1)
            status, value = await fleet.ask(url, "a cat", seed=7)
            assert (status, value["data"]) == (200, [{"b64_json": "a cat 7"}])
            _, first = await fleet.ask(url, "a dog")
            assert first["data"][0]["b64_json"].split()[-1].isdigit()  # a seed was drawn
            assert (await fleet.status(url))["workers"][0]["id"] == "w1"

            await no_jobs(fleet, url)
            large = "x" * 700_000 + " cat"
            status, value = await fleet.ask(url, "a", seed=1, unknown=large)
            assert status == 200 and role.served == ["a cat", "a dog", "a"]

    play(scene)


def test_a_malformed_request_is_no_job(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url:
            assert (await fleet.ask(url, "x"))[0] == 503  # no worker
            async with fleet.worker("w1", role):
                await fleet.know(url, 1)
                for options, code in (
                    ({"n": 9999}, "invalid_value"),
                    ({"model": "other"}, "model_not_found"),
                    ({"model": "NOT A NAME"}, "model_not_found"),
                    ({"headers": {"Aimage-Priority": "urgent"}}, "invalid_value"),
                    ({"headers": {"Idempotency-Key": "k" * 300}}, "invalid_value"),
                ):
                    status, value = await fleet.ask(url, "x", **options)
                    assert status in (400, 404) and value["error"]["code"] == code
            assert not role.served
            async with fleet.session.get(f"{url}/v1/store") as answer:
                text = (await answer.json())["error"]["message"]
                assert answer.status == 501 and "ask a worker at its own address" in text

    play(scene)


def test_a_stream_has_comments_while_its_job_waits(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_relay, "KEEP_ALIVE", 0.05)
    has_comments = asyncio.Event()

    async def slow(request: Request, body: dict[str, Any]) -> web.StreamResponse:
        await (asyncio.Event() if body["prompt"] == "late" else has_comments).wait()
        if body["prompt"] == "refused":
            return web.json_response({"error": {"message": "too large"}}, status=400)
        answer = ResponseWriter(request, web.StreamResponse(headers={"Content-Type": SSE}))
        await answer.begin()
        await answer.write(b'data: {"type": "image_generation.completed"}\n\n')
        return await answer.end()

    async def scene(fleet: FleetRun) -> None:
        async def stream(url: str, prompt: str) -> list[str]:
            body = {"model": "tiny", "prompt": prompt, "stream": True}
            has_comments.clear()
            async with fleet.session.post(url + PICTURES, json=body) as answer:
                assert answer.status == 200 and answer.content_type == SSE
                text = ""
                async for line in answer.content:
                    text += line.decode()
                    if text.count(": keep-alive\n\n") == 2:
                        has_comments.set()
                return text.split("\n\n")[:-1]

        async with fleet.gateway() as url, fleet.worker("w1", ScriptedRole(slow)):
            await fleet.know(url, 1)
            for prompt, last in (
                ("made", 'data: {"type": "image_generation.completed"}'),
                ("refused", 'event: error\ndata: {"error": {"message": "too large"}}'),
            ):
                *comments, end = await stream(url, prompt)
                assert end == last and len(comments) >= 2
                assert set(comments) == {": keep-alive"}
            # ten comments long, so that a busy machine has begun the stream by then
            async with fleet.gateway(deadline=0.5) as hurried:
                await fleet.know(hurried, 1)
                *_, end = await stream(hurried, "late")
                assert end.startswith("event: error") and "deadline" in end

    play(scene)


class PullingRole(Role):
    """A worker that pulls a model with one blob; ``fails`` says how."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def build_routes(self) -> list[Route]:
        return [SharedRoute("POST", "/api/pull", self._pull, ADMIN)]

    async def _pull(self, request: Request) -> web.StreamResponse:
        lines = NdjsonStream(request)
        await lines.write({"status": "pulling manifest"})
        for done in (1, 2, 10):
            digest = f"sha256:{'a' * 64}"
            blob = {"status": "pulling a", "digest": digest, "total": 10, "size": 10}
            await lines.write({**blob, "completed": done})
        if self._fails:
            return await lines.fail(AImageError(self._fails))
        await lines.write({"status": "success"})
        return await lines.end()


def test_a_pull_has_the_progress_of_all_workers(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        async def pull(url: str) -> list[dict[str, Any]]:
            async with fleet.session.post(f"{url}/api/pull", json={"model": "x"}) as answer:
                assert answer.status == 200 and answer.content_type == NDJSON
                return [json.loads(line) for line in (await answer.text()).splitlines()]

        async with fleet.gateway() as url, fleet.worker("w1", PullingRole()):
            async with fleet.worker("w2", PullingRole()):
                await fleet.know(url, 2)
                first, blob, end = await pull(url)
                assert first == {"status": "pulling manifest"} and end == {"status": "success"}
                assert (blob["completed"], blob["total"], blob["size"]) == (20, 20, 20)
            async with fleet.worker("w3", PullingRole("no room")):
                await fleet.know(url, 2)
                *_, end = await pull(url)
                assert end["error"] == "no room" and end["status"] == 500

    play(scene)


def test_a_key_is_one_job_at_all_gateways(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        begun = asyncio.Event()

        async def slow(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            begun.set()
            await asyncio.sleep(0.3)
            return await prompt_as_picture(request, body)

        role = ScriptedRole(slow)
        async with fleet.gateway() as one, fleet.gateway() as other, fleet.worker("w1", role):
            await fleet.know(one, 1)
            await fleet.know(other, 1)
            key = {"headers": {"Idempotency-Key": "same"}}
            asked = [asyncio.create_task(fleet.ask(url, "a cat", **key)) for url in (one, other)]
            await begun.wait()
            leaving = asyncio.create_task(fleet.ask(one, "a cat", **key))
            await asyncio.sleep(0.05)
            leaving.cancel()  # which does not end the job
            found = await asyncio.gather(*asked)
            assert found[0] == found[1] and found[0][0] == 200
            assert await fleet.ask(other, "a cat", **key) == found[0]  # when it is over
            assert role.served == ["a cat"]
            status, value = await fleet.ask(other, "a dog", **key)
            assert (status, value["error"]["code"]) == (422, "idempotency_key_reused")

    play(scene)


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


async def no_jobs(fleet: FleetRun, url: str) -> None:
    """Wait until no job is on the queue."""

    async def is_empty() -> bool:
        return (await fleet.status(url))["jobs"] == 0

    await until_async(is_empty)


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


async def broken(request: Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no memory"}}, status=500)


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


def test_a_large_request_may_be_repeated_at_once(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        large = {"unknown": "x" * 900_000, "headers": {"Idempotency-Key": "large"}}
        async with fleet.gateway() as one, fleet.gateway() as two, fleet.worker("w1", role):
            await fleet.know(one, 1)
            await fleet.know(two, 1)
            asked = (fleet.ask(url, "a cat", seed=1, **large) for url in (one, two, one))
            found = await asyncio.gather(*asked)
        assert [status for status, _ in found] == [200] * 3
        assert len(role.served) == 1

    play(scene)


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
    from clowder_aimage.fleet.job.job import FleetJob

    digest = next(iter((await fleet.status(url))["workers"]))["models"]["tiny:latest"]
    body = {"model": "tiny", "prompt": "x", "seed": 1}
    again = FleetJob(job, PICTURES, "infer", "me", "tiny", "tiny:latest", digest, fields=body)
    await JobQueue(link, lambda _: True).put(QueuedJob(again, ticket, publications=1))

    async def is_dead() -> bool:
        return (await fleet.status(url))["given_up"] == 1

    await until_async(is_dead)
    _, last = (await link.read_marks(job))[-1]
    return str(json.loads(last.data)["message"])


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


def held_role() -> tuple[ScriptedRole, asyncio.Event, asyncio.Event]:
    """Return a role whose jobs wait, the event that one has begun, and the one they wait for."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, body: dict[str, Any]) -> web.StreamResponse:
        begun.set()
        await go_on.wait()
        return await prompt_as_picture(request, body)

    return ScriptedRole(wait), begun, go_on


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


def test_requests_wait_for_a_server_that_is_killed(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Nats(tmp_path / "js").start()

    async def scene(fleet: FleetRun) -> None:
        role, begun, go_on = held_role()
        async with fleet.gateway() as url, fleet.worker("w1", role):
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "a", seed=5))
            await begun.wait()
            own.kill()
            go_on.set()

            async def is_refused() -> bool:
                async with fleet.session.post(url + PICTURES, json={"prompt": "x"}) as answer:
                    return answer.status == 503 and answer.headers["Retry-After"] == "2"

            await until_async(is_refused)
            await asyncio.to_thread(own.start)
            assert (await asked)[1]["data"][0]["b64_json"] == "a 5"
            assert role.served == ["a"]
            await fleet.know(url, 1)
            assert (await fleet.ask(url, "b"))[0] == 200

    try:
        play(scene, own)
    finally:
        own.kill()


def test_a_fleet_that_is_not_prepared_is_named(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        link = fleet.operator()
        async with link.open():
            await link.wait_until_ready(PATIENCE)
            config = (await link.streams.stream_info(link.names.logs)).config
            config.subjects = ["other.>"]
            await link.streams.update_stream(config)
            async with fleet.gateway(is_awaited=False) as url:

                async def says() -> bool:
                    _, value = await fleet.ask(url, "x")
                    return "its subjects are other.>" in value["error"]["message"]

                await until_async(says)
                await link.streams.delete_stream(link.names.jobs)

                async def says_more() -> bool:
                    async with fleet.session.get(f"{url}/readyz") as answer:
                        return "no stream" in await answer.text()

                await until_async(says_more)
                await fleet.make()

                async def is_ready() -> bool:
                    async with fleet.session.get(f"{url}/readyz") as answer:
                        return answer.status == 200

                await until_async(is_ready)

    play(scene)


def test_a_stream_that_is_deleted_while_gateways_are_connected_is_named(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_reader, "SILENCE", 0.2)
    monkeypatch.setattr(fleet_link, "CHECK", 0.2)

    async def scene(fleet: FleetRun) -> None:
        link, (role, begun, go_on) = fleet.operator(), held_role()
        async with fleet.gateway() as url, fleet.worker("w1", role), link.open():
            await link.wait_until_ready(PATIENCE)
            await fleet.know(url, 1)
            for name in (link.names.jobs, link.names.logs):
                begun.clear()
                waiting = asyncio.create_task(fleet.ask(url, "waits"))
                await begun.wait()
                await link.streams.delete_stream(name)
                for asked in (waiting, fleet.ask(url, "x")):
                    status, value = await asked
                    assert status == 503, value
                    assert f"no stream {name}" in value["error"]["message"]
                await fleet.make()
                go_on.set()

                async def is_answered() -> bool:
                    return (await fleet.ask(url, "again", seed=1))[0] == 200

                await until_async(is_answered)
                go_on.clear()

    play(scene)


def test_a_full_queue_refuses_and_loses_nothing(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        await fleet.make(max_bytes=1 << 16)  # a fourth of it for jobs
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("w1", role):
            await fleet.know(url, 1)
            status, value = await fleet.ask(url, "x", unknown="y" * 40_000)
            assert status == 503 and "full" in value["error"]["message"]
            assert (await fleet.ask(url, "x"))[0] == 200
            for size, status in ((40_000, 507), (4_000, 200)):  # a fourth is for files, too
                form = aiohttp.FormData({"purpose": "batch"})
                form.add_field("file", b"x" * size, filename="in.jsonl")
                async with fleet.session.post(f"{url}/v1/files", data=form) as answer:
                    assert answer.status == status, await answer.text()
                    assert status == 200 or "files is full" in await answer.text()
            async with fleet.session.get(f"{url}/v1/files") as answer:
                assert [one["bytes"] for one in (await answer.json())["data"]] == [4_000]

    play(scene)


async def run_batch(fleet: FleetRun, begin: str, end: str, *prompts: str) -> list[str]:
    """Begin a batch at a gateway, and return the first words of its output at another one."""
    line = {"method": "POST", "url": PICTURES}
    lines = (
        {**line, "custom_id": one, "body": {"model": "tiny", "prompt": one}} for one in prompts
    )
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, lines)), filename="in.jsonl")
    async with fleet.session.post(f"{begin}/v1/files", data=form) as answer:
        assert answer.status == 200, await answer.text()
        name = (await answer.json())["id"]
    body = {"input_file_id": name, "endpoint": PICTURES, "completion_window": "24h"}
    async with fleet.session.post(f"{begin}/v1/batches", json=body) as answer:
        batch = await answer.json()

    async def is_over() -> bool:
        async with fleet.session.get(f"{end}/v1/batches/{batch['id']}") as answer:
            batch.update(await answer.json())
            return batch["status"] == "completed"

    await until_async(is_over)
    async with fleet.session.get(f"{end}/v1/files/{batch['output_file_id']}/content") as answer:
        found = [json.loads(each) for each in (await answer.text()).splitlines()]
    async with fleet.session.delete(f"{end}/v1/files/{name}") as answer:
        assert (await answer.json())["deleted"]
    made = [each["response"]["body"]["data"][0]["b64_json"] for each in found]
    return sorted(text.rpartition(" ")[0] for text in made)


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


def test_the_shipped_configuration_allows_what_a_fleet_does(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passwords = {kind: f"{kind}-password" for kind in (GATEWAY, WORKER, OPERATOR)}
    for kind, password in passwords.items():
        monkeypatch.setenv(f"NATS_{kind.upper()}_PASSWORD", password)
    (tmp_path / "nats.conf").write_text(shipped(tmp_path / "js"))
    own = Nats(tmp_path / "js", arguments=("-c", str(tmp_path / "nats.conf"))).start()

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker(SHIPPED_WORKER, role):
            await fleet.know(url, 1)
            key = {"headers": {"Idempotency-Key": "k"}}
            for _ in range(2):
                assert (await fleet.ask(url, "a cat", **key))[0] == 200
            assert (await fleet.ask(url, "a dog", unknown="x" * 900_000))[0] == 200
            async with fleet.session.get(f"{url}/v1/models/x") as answer:
                assert answer.status == 404  # of the scripted worker, which was asked
            assert (await run_batch(fleet, url, url, "a fox")) == ["a fox"]
            assert (await fleet.status(url))["jobs"] == 0
            link = fleet.operator()
            async with link.open():
                await link.wait_until_ready(PATIENCE)
                assert (await give_order(link, SHIPPED_WORKER, "drain"))["is_draining"]

    try:
        play(scene, own, name="aimage", passwords=passwords)
    finally:
        own.kill()


def test_a_finished_job_that_the_server_left_on_the_queue_is_removed(play_quietly: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        link = fleet.gateway_link()
        async with link.open(), fleet.gateway() as url:
            await link.wait_until_ready(PATIENCE)
            running = "ab" * 32
            for name, digest in (("done", "cd" * 32), ("running", running)):
                subject = link.names.build_job_subject(BATCH, digest, "me")
                ticket = JobTicket.generate(name)
                await link.store(subject, b"x", {JOB: name, TICKET: ticket.encode()})
                log = await begin(link, "w", ticket)
                if name == "done":
                    await log.end()

            async def is_removed() -> bool:
                queue = (await fleet.status(url))["queue"]
                return [each["digest"] for each in queue] == [f"sha256:{running}"]

            await until_async(is_removed)

    play_quietly(scene)


def test_a_cluster_loses_a_server_and_no_job(play: Play, tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    routes = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
    servers = [
        Nats(
            tmp_path / f"js{at}",
            arguments=(
                *("--cluster", f"nats://127.0.0.1:{port}", "--cluster_name", "c"),
                *("--routes", routes, "-n", f"n{at}"),
            ),
        ).start()
        for at, port in enumerate(ports)
    ]

    async def scene(fleet: FleetRun) -> None:
        async def slow(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.05)
            return await prompt_as_picture(request, body)

        first, other = ScriptedRole(slow), ScriptedRole(slow)
        async with fleet.gateway() as url, fleet.worker("a", first), fleet.worker("b", other):
            await fleet.know(url, 2)
            asked = []
            for number in range(60):
                key = {"headers": {"Idempotency-Key": str(number)}}
                asked.append(asyncio.create_task(_insist(fleet, url, number, key)))
                if number == 20:
                    await until_async(lambda: len(first.served) + len(other.served) > 5)
                    servers[0].kill()
            assert await asyncio.gather(*asked) == [f"{number} 1" for number in range(60)]
            await fleet.know(url, 2)  # the gateway answers 503 while the servers elect a leader
            assert (await fleet.status(url))["given_up"] == 0

    try:
        play(scene, servers[0], url=",".join(each.url for each in servers), replicas=3)
    finally:
        for each in servers:
            each.kill()


async def _insist(fleet: FleetRun, url: str, number: int, options: dict[str, Any]) -> str:
    """Return the answer to a request, which is repeated while the fleet is unavailable."""
    while True:
        status, value = await fleet.ask(url, str(number), seed=1, **options)
        if status == 200:
            return str(value["data"][0]["b64_json"])
        assert status == 503, value
        await asyncio.sleep(0.2)

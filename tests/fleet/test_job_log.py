"""The frames of attempts in orders that no clock decides, on a real NATS server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from nats.aio.msg import Msg

from clowder_aimage.engine.admission import NEVER
from clowder_aimage.errors import FormatError, NetworkError, NotFoundError
from clowder_aimage.fleet.frame import BEGIN, END, RELEASED, Attempt
from clowder_aimage.fleet.job import log as job_log
from clowder_aimage.fleet.job import reader as job_reader
from clowder_aimage.fleet.job.choice import Key
from clowder_aimage.fleet.job.envelope import JOB, TICKET
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.log import JobLog, SupersededError
from clowder_aimage.fleet.job.run import JobRun
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import WorkerRegistry
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN, INFER
from clowder_aimage.oci import Reference
from tests.fleet.attempt import begin, read_kinds
from tests.fleet.fleet_run import PICTURES, FleetRun, ScriptedRole, prompt_as_picture
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


async def say(log: JobLog, text: str) -> None:
    await log.write_head(200, [("Content-Type", "application/json")])
    await log.write_data(json.dumps(text).encode())


async def on_queue(fleet: FleetRun) -> JobTicket:
    """Return the ticket of the first job on the queue."""
    found: list[Any] = []
    link = fleet.gateway_link()

    async def is_there() -> bool:
        names = link.names
        subject = f"{names.fleet}.job.>"
        found.extend([one async for _, one in link.read_messages(subject, 0, names.jobs)])
        return bool(found)

    async with link.open():
        await link.wait_until_ready(PATIENCE)
        await until_async(is_there)
    return JobTicket.parse(found[0].headers[JOB], found[0].headers[TICKET])


def test_the_client_gets_the_response_of_the_attempt_that_began_last(play: Play) -> None:
    """The workers a and b stall and go on, or are killed, after others have begun."""

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        key = {"headers": {"Idempotency-Key": "k"}}
        async with fleet.gateway() as url, fleet.worker("w", role) as worker:
            worker.takes_jobs = False  # its attempts are made here
            link = worker._link
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "x", **key))
            ticket = await on_queue(fleet)
            a = await begin(link, "a", ticket)
            await say(a, "a")
            b = await begin(link, "b", ticket)
            await a.write_data(b"late")
            with pytest.raises(SupersededError):
                await a.end()
            await say(b, "b")
            c = await begin(link, "c", ticket)
            assert c.attempt == Attempt(3, ("a", "b"))
            await say(c, "c")
            await c.end()
            assert await asked == (200, "c")
            for log in (a, b):
                await log.write_data(b"later")
                with pytest.raises(SupersededError):
                    await log.end(RELEASED)
            with pytest.raises(SupersededError):  # it was stopped before it acknowledged the job
                await c.end(RELEASED)
            assert await fleet.ask(url, "x", **key) == (200, "c")

            async def is_removed() -> bool:
                return (await fleet.status(url))["jobs"] == 0

            await until_async(is_removed)
            assert await read_kinds(link, ticket.job) == [
                *("admitted", BEGIN, BEGIN, END, BEGIN, END),
                # Those of attempts that do not count.
                *(RELEASED, RELEASED, RELEASED),
            ]
            assert not role.served

    play(scene)


def test_a_mark_that_was_stored_without_an_answer_is_recognised(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "FULL", 0.01)

    async def scene(fleet: FleetRun) -> None:
        async with fleet.worker("w", ScriptedRole(prompt_as_picture)) as worker:
            worker.takes_jobs = False
            link = worker._link
            store, attempt = link.store, Attempt(1, ())

            lost = list[str]()

            async def deaf(subject: str, *message: Any) -> int:
                number = await store(subject, *message)
                if len(lost) % 2 == 0:
                    lost.append(subject)
                    raise NetworkError("no answer")
                lost.append("")
                return number

            log = JobLog(link, "w", attempt, JobTicket.generate("j"))
            monkeypatch.setattr(link, "store", deaf)
            await log.begin()
            await log.end()
            assert len(lost) == 4
            assert await read_kinds(link, "j") == [BEGIN, END]

    play(scene)


def test_a_job_that_no_worker_can_read_is_ended_by_the_last(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        ended = list[str]()

        async def term() -> None:
            ended.append("term")

        async with fleet.worker("old", ScriptedRole(prompt_as_picture)) as worker:
            worker.takes_jobs = False
            metadata, ticket = SimpleNamespace(num_delivered=9), JobTicket.generate("j")
            headers = {JOB: "j", TICKET: ticket.encode()}
            message: Any = SimpleNamespace(headers=headers, metadata=metadata, term=term)
            await worker._refuse(message, FormatError("unknown field"))
            assert await read_kinds(worker._link, "j") == [BEGIN, "dead"] and ended == ["term"]
            # It is over: nothing is written again.
            await worker._refuse(message, FormatError("unknown field"))
            assert await read_kinds(worker._link, "j") == [BEGIN, "dead"]

    play(scene)


def test_a_model_that_a_job_pulled_has_the_name_that_was_asked_for(play: Play) -> None:
    """It is pulled by the digest for which the job was admitted."""

    async def scene(fleet: FleetRun) -> None:
        async with fleet.worker("w", ScriptedRole(prompt_as_picture)) as worker:
            store, link = worker._service.store, worker._link
            digest = str(store.resolve(Reference.parse("tiny")).digest)
            nothing: Any = None
            ticket = JobTicket.generate("j")

            async def served(model: str, scope: str, digest: str, **fields: Any) -> str:
                job = FleetJob("j", "/", scope, "", model, model, digest, fields=fields)
                run = JobRun(
                    link, nothing, worker._service, "w", WorkerRegistry(), nothing, job, ticket
                )
                name = str((run._pin().fields or {}).get("model", "unchanged"))
                await run._name()
                return name

            other = "127.0.0.1:1/team/tiny:latest"
            for scope, fields in ((INFER, {}), (ADMIN, {"pull": NEVER})):
                assert await served(other, scope, digest, **fields) == f"{other}@{digest}"
                with pytest.raises(NotFoundError):
                    store.resolve(Reference.parse(other))
            assert await served(other, ADMIN, digest) == f"{other}@{digest}"
            assert str(store.resolve(Reference.parse(other)).digest) == digest
            assert await served(other, ADMIN, digest) == "unchanged"
            newer = f"sha256:{'0' * 64}"  # of other workers
            assert await served(other, ADMIN, newer) == f"{other}@{newer}"
            assert str(store.resolve(Reference.parse(other)).digest) == digest

    play(scene)


def test_a_job_that_another_worker_removed_from_the_queue_is_published_again(
    play_quietly: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may acknowledge any message; a job ends only by its marks."""
    monkeypatch.setattr(job_reader, "SILENCE", 0.05)

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("w", role) as worker:
            worker.takes_jobs = False
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "a cat", seed=1))
            ticket = await on_queue(fleet)
            # A worker that has left began it and removed it.
            await begin(worker._link, "gone", ticket)
            async with fleet.opened_gateway_link() as link:
                await link.streams.purge_stream(link.names.jobs)
            worker.takes_jobs = True
            worker._wake.set()
            status, answer = await asked
            assert (status, answer["data"][0]["b64_json"]) == (200, "a cat 1")
            assert role.served == ["a cat"]

    play_quietly(scene)


def test_a_job_that_workers_remove_again_and_again_is_given_up(
    play_quietly: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_reader, "SILENCE", 0.02)

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with (
            fleet.gateway() as url,
            fleet.worker("w", role) as worker,
            fleet.opened_gateway_link() as link,
        ):
            worker.takes_jobs = False
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "a cat"))
            while not asked.done():
                await link.streams.purge_stream(link.names.jobs)
                await asyncio.sleep(0.01)
            status, answer = await asked
            assert (status, answer["error"]["code"]) == (500, "job_given_up")
            assert not role.served

    play_quietly(scene)


def test_what_a_job_stored_is_removed_when_it_is_over(play: Play) -> None:
    """Its large body always, and its response unless an idempotency key keeps it."""

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        large = {"prompt": "x", "unknown": "x" * 900_000}
        async with (
            fleet.gateway() as url,
            fleet.worker("w", role),
            fleet.opened_gateway_link() as link,
        ):
            await fleet.know(url, 1)

            async def count() -> tuple[int, int]:
                names, info = link.names, link.streams.stream_info
                bodies, logs = await info(names.bodies), await info(names.logs)
                return bodies.state.messages, logs.state.messages

            async def is_empty() -> bool:
                return await count() == (0, 0)

            body = {"model": "tiny", **large}
            async with fleet.session.post(url + PICTURES, json=body) as answer:
                assert answer.status == 200
            await until_async(is_empty)
            headers = {"Idempotency-Key": "k"}
            async with fleet.session.post(url + PICTURES, json=body, headers=headers) as answer:
                assert answer.status == 200

            async def has_response() -> bool:
                bodies, logs = await count()
                return bodies == 0 and logs > 0

            await until_async(has_response)

    play(scene)


@pytest.mark.parametrize("taker", ["w1", "w2"])
def test_a_job_that_another_worker_sent_back_to_the_queue_is_not_begun_twice(
    play_quietly: Play, monkeypatch: pytest.MonkeyPatch, taker: str
) -> None:
    """Any worker may do so with the messages of others, by their numbers."""

    async def scene(fleet: FleetRun) -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def answer(request: Request, body: dict[str, Any]) -> web.StreamResponse:
            begun.set()
            await may_end.wait()
            return await prompt_as_picture(request, body)

        role, other = ScriptedRole(answer), ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker("w1", role) as first:
            await fleet.know(url, 1)
            asked = asyncio.create_task(fleet.ask(url, "a cat", seed=1))
            await begun.wait()
            async with fleet.worker("w2", other) as second, fleet.opened_gateway_link() as link:
                await fleet.know(url, 2)
                (run,) = first._runs.values()
                first.takes_jobs, second.takes_jobs = taker == "w1", taker == "w2"
                worker = first if taker == "w1" else second
                delivered, serve = list[Msg](), worker._serve

                async def take(message: Msg, key: Key) -> None:
                    await serve(message, key)
                    delivered.append(message)

                monkeypatch.setattr(worker, "_serve", take)
                await link.client.publish(run.message.reply, b"-NAK")
                await until_async(lambda: delivered)
                may_end.set()
                assert (await asked)[0] == 200
                kinds = await read_kinds(link, run.job.id)
                assert kinds == [BEGIN, END] and not other.served and role.served == ["a cat"]

    play_quietly(scene)

"""The frames of attempts in orders that no clock decides, on a real NATS server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.engine.admission import NEVER
from clowder_aimage.errors import FormatError, NetworkError, NotFoundError
from clowder_aimage.fleet.frame import BEGIN, END, RELEASED, Attempt, Frame
from clowder_aimage.fleet.job import log as job_log
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.log import JobLog
from clowder_aimage.fleet.job.run import JobRun
from clowder_aimage.fleet.link import MESSAGE_ID, FleetLink, LastFrameError
from clowder_aimage.fleet.worker_registry import WorkerRegistry
from clowder_aimage.http.route import ADMIN, INFER
from clowder_aimage.oci import Reference
from tests.fleet.fleet_run import FleetRun, ScriptedRole, prompt_as_picture
from tests.wait import until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


async def begin(link: FleetLink, job: str, worker: str) -> JobLog:
    """Begin the next attempt at a job, as a worker does that gets its message."""
    last, after = await link.read_last(link.names.build_mark_subject(job))
    log = JobLog(link, job, worker, Attempt.following(last))
    await log.begin(after)
    return log


async def say(log: JobLog, text: str) -> None:
    await log.write_head(200, [("Content-Type", "application/json")])
    await log.write_data(json.dumps(text).encode())


async def marks(link: FleetLink, job: str) -> list[str]:
    found = [one async for _, one in link.read_messages(link.names.build_mark_subject(job), 0)]
    frames = [Frame.parse(one.headers, one.data) for one in found]
    return [frame.kind for frame in frames if frame is not None]


async def on_queue(link: FleetLink) -> str:
    """Return the id of the first job on the queue."""
    found: list[Any] = []

    async def is_there() -> bool:
        names = link.names
        subject = f"{names.fleet}.job.>"
        found.extend([one async for _, one in link.read_messages(subject, 0, names.jobs)])
        return bool(found)

    await until_async(is_there)
    return str(found[0].headers[MESSAGE_ID])


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
            job = await on_queue(link)
            a = await begin(link, job, "a")
            await say(a, "a")
            b = await begin(link, job, "b")
            await a.write_data(b"late")
            with pytest.raises(LastFrameError):
                await a.end()
            await say(b, "b")
            c = await begin(link, job, "c")
            assert c.attempt == Attempt(3, ("a", "b"))
            await say(c, "c")
            await c.end()
            assert await asked == (200, "c")
            for log in (a, b):
                await log.write_data(b"later")
                with pytest.raises(LastFrameError):
                    await log.end(RELEASED)
            with pytest.raises(LastFrameError):  # it was stopped before it acknowledged the job
                await c.end(RELEASED)
            assert await fleet.ask(url, "x", **key) == (200, "c")
            last, _ = await link.read_last(link.names.build_log_subject(job))
            assert last is not None and last.attempt < 3  # and yet the job is known to be over

            async def is_removed() -> bool:
                return (await fleet.status(url))["jobs"] == 0

            await until_async(is_removed)
            assert await marks(link, job) == ["admitted", BEGIN, BEGIN, BEGIN, END]
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

            async def deaf(*message: Any, **more: Any) -> int:
                monkeypatch.setattr(link, "store", store)
                await store(*message, **more)
                raise NetworkError("no answer")

            log, same = (JobLog(link, "j", "w", attempt) for _ in range(2))
            monkeypatch.setattr(link, "store", deaf)
            await log.begin(0)
            with pytest.raises(LastFrameError):  # the job was delivered to this worker twice
                await same.begin(0)
            monkeypatch.setattr(link, "store", deaf)
            await log.end()
            assert await marks(link, "j") == [BEGIN, END]

    play(scene)


def test_a_job_that_another_worker_reads_is_not_ended_by_one_that_cannot(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(fleet: FleetRun) -> None:
        ended = list[str]()

        async def term() -> None:
            ended.append("term")

        async def none(_: str) -> tuple[None, int]:
            return None, 0

        async with fleet.worker("old", ScriptedRole(prompt_as_picture)) as worker:
            worker.takes_jobs = False
            await begin(worker._link, "j", "new")
            metadata = SimpleNamespace(num_delivered=9)
            message: Any = SimpleNamespace(headers={MESSAGE_ID: "j"}, metadata=metadata, term=term)
            # It looked before the other one began.
            monkeypatch.setattr(worker._link, "read_last", none)
            await worker._refuse(message, FormatError("unknown field"))
            monkeypatch.undo()
            assert await marks(worker._link, "j") == [BEGIN] and not ended
            other: Any = SimpleNamespace(
                headers={MESSAGE_ID: "other"}, metadata=metadata, term=term
            )
            await worker._refuse(other, FormatError("unknown field"))
            assert await marks(worker._link, "other") == [BEGIN, "dead"] and ended == ["term"]

    play(scene)


def test_a_model_that_a_job_pulled_has_the_name_that_was_asked_for(play: Play) -> None:
    """It is pulled by the digest for which the job was admitted."""

    async def scene(fleet: FleetRun) -> None:
        async with fleet.worker("w", ScriptedRole(prompt_as_picture)) as worker:
            store, link = worker._service.store, worker._link
            digest = str(store.resolve(Reference.parse("tiny")).digest)
            nothing: Any = None

            async def served(model: str, scope: str, digest: str, **fields: Any) -> str:
                job = FleetJob("j", "/", scope, "", model, model, digest, fields=fields)
                run = JobRun(link, nothing, worker._service, "w", WorkerRegistry(), nothing, job)
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

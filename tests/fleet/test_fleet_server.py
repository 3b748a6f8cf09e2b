"""NATS servers that are killed, full, not prepared, or configured as shipped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from clowder_aimage.fleet import link as fleet_link
from clowder_aimage.fleet.job import reader as job_reader
from clowder_aimage.fleet.job.envelope import JOB, TICKET
from clowder_aimage.fleet.name import BATCH, GATEWAY, OPERATOR, WORKER
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import give_order
from clowder_aimage.http.local_request import Request
from tests.fleet.attempt import begin
from tests.fleet.fleet_run import (
    PICTURES,
    SHIPPED_WORKER,
    FleetRun,
    Nats,
    ScriptedRole,
    free_port,
    held_role,
    prompt_as_picture,
    run_batch,
)
from tests.fleet.nats_config import shipped
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


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

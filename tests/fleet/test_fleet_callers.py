"""The bounds of each caller at gateways: several of them agree, by what is stored in NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from clowder_aimage.api.batch import run as batch_run
from clowder_aimage.fleet.gateway import gateway as fleet_gateway
from clowder_aimage.fleet.gateway.batch_store import FleetBatchStore
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.http.caller import compute_name
from clowder_aimage.http.caller_ledger import CallerBounds
from tests.fleet.fleet_run import (
    PICTURES,
    FleetRun,
    ScriptedRole,
    held_role,
    prompt_as_picture,
)
from tests.wait import until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]
MINE, THEIRS, ADMIN = "m" * 20, "t" * 20, "r" * 20
TOKENS = {MINE: "infer", THEIRS: "infer", ADMIN: "admin"}


def authorize(token: str, **others: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **others}


async def upload(fleet: FleetRun, url: str, token: str, size: int = 10) -> tuple[int, Any]:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x" * size, filename="in.jsonl")
    address = f"{url}/v1/files"
    async with fleet.session.post(address, data=form, headers=authorize(token)) as answer:
        return answer.status, await answer.json()


async def begin(fleet: FleetRun, url: str, token: str, file: str) -> tuple[int, Any]:
    body = {"input_file_id": file, "endpoint": PICTURES, "completion_window": "24h"}
    address = f"{url}/v1/batches"
    async with fleet.session.post(address, json=body, headers=authorize(token)) as answer:
        return answer.status, await answer.json()


async def read(fleet: FleetRun, url: str, path: str, token: str) -> tuple[int, Any]:
    async with fleet.session.get(url + path, headers=authorize(token)) as answer:
        return answer.status, await answer.json()


async def enter(stack: AsyncExitStack, fleet: FleetRun, bounds: CallerBounds) -> list[str]:
    """Return the addresses of two gateways."""
    runs = (fleet.gateway(tokens=TOKENS, bounds=bounds) for _ in range(2))
    return [await stack.enter_async_context(run) for run in runs]


async def operate(stack: AsyncExitStack, fleet: FleetRun) -> FleetLink:
    """Return the connection of an operator."""
    link = fleet.operator()
    await stack.enter_async_context(link.open())
    await link.wait_until_ready(30)
    return link


def test_files_and_batches_of_a_token_are_bounded_at_all_gateways(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "FLUSH_INTERVAL", 0.05)

    async def scene(fleet: FleetRun) -> None:
        async with AsyncExitStack() as stack:
            urls = await enter(stack, fleet, CallerBounds(max_bytes=1000, max_batches=3))
            name = (await upload(fleet, urls[0], MINE, 600))[1]["id"]
            for url in urls:
                status, value = await upload(fleet, url, MINE, 600)
                assert (status, value["error"]["code"]) == (413, "too_many_bytes_in_files")
            other = (await upload(fleet, urls[1], THEIRS, 600))[1]["id"]
            for number in range(3):
                assert (await begin(fleet, urls[number % 2], MINE, name))[0] == 200
            for url in urls:
                status, value = await begin(fleet, url, MINE, name)
                assert (status, value["error"]["code"]) == (429, "too_many_open_batches")
            assert (await begin(fleet, urls[0], THEIRS, other))[0] == 200
            assert (await read(fleet, urls[0], f"/v1/files/{name}", THEIRS))[0] == 404
            _, seen = await read(fleet, urls[0], "/v1/batches", ADMIN)
            assert {entry["owner"] for entry in seen["data"]} == {
                compute_name(MINE),
                compute_name(THEIRS),
            }

    play(scene)


def test_a_list_at_a_gateway_gets_the_records_of_its_owner_only(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "FLUSH_INTERVAL", 3600)
    parse, parsed = FleetBatchStore._parse, list[str]()

    def record(self: FleetBatchStore, entry: Any, key: tuple[str, str]) -> Any:
        parsed.append(key[0])
        return parse(self, entry, key)

    async def scene(fleet: FleetRun) -> None:
        async with AsyncExitStack() as stack:
            url, _ = await enter(stack, fleet, CallerBounds())
            for _ in range(3):
                for token in (MINE, THEIRS):
                    assert (await upload(fleet, url, token))[0] == 200
            monkeypatch.setattr(FleetBatchStore, "_parse", record)
            _, page = await read(fleet, url, "/v1/files?limit=2", MINE)
            assert (len(page["data"]), page["has_more"]) == (2, True)
            assert set(parsed) == {compute_name(MINE)}

    play(scene)


def test_bodies_of_a_token_are_bounded_at_all_gateways_also_without_their_client(
    play: Play,
) -> None:
    async def scene(fleet: FleetRun) -> None:
        role, begun, go_on = held_role()
        large = {"unknown": "x" * 900_000}
        async with AsyncExitStack() as stack:
            urls = await enter(stack, fleet, CallerBounds(max_body_bytes=1_500_000))
            await stack.enter_async_context(fleet.worker("w1", role))
            fleet.session.headers.update(authorize(MINE))
            for url in urls:
                await fleet.know(url, 1)
            key = {"headers": authorize(MINE, **{"Idempotency-Key": "k"})}
            asked = asyncio.create_task(fleet.ask(urls[0], "a", **key, **large))
            await begun.wait()
            asked.cancel()
            await asyncio.wait([asked])
            status, value = await fleet.ask(urls[1], "b", **large)
            assert (status, value["error"]["code"]) == (
                429,
                "too_many_bytes_in_requests_in_progress",
            )
            theirs = fleet.ask(urls[1], "c", headers=authorize(THEIRS), **large)
            waiting = asyncio.create_task(theirs)
            go_on.set()
            assert (await waiting)[0] == 200

    play(scene)


def test_jobs_that_go_on_without_their_client_are_bounded(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_gateway, "MIN_WINDOW", 2)

    async def scene(fleet: FleetRun) -> None:
        role, begun, go_on = held_role()
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(fleet.gateway(tokens=TOKENS, most=2))
            await stack.enter_async_context(fleet.worker("w1", role))
            fleet.session.headers.update(authorize(MINE))
            await fleet.know(url, 1)
            link = await operate(stack, fleet)

            async def count() -> int:
                return (await link.streams.stream_info(link.names.jobs)).state.messages

            async def leave(key: str, expected: int) -> None:
                headers = authorize(MINE, **{"Idempotency-Key": key})
                asked = asyncio.create_task(fleet.ask(url, key, headers=headers))

                async def is_stored() -> bool:
                    return await count() == expected

                await until_async(is_stored)
                asked.cancel()
                await asyncio.wait([asked])

            for number in (1, 2):
                await leave(f"k{number}", number)
            await begun.wait()
            headers = authorize(MINE, **{"Idempotency-Key": "more"})
            status, value = await fleet.ask(url, "more", headers=headers)
            assert (status, value["error"]["code"]) == (429, "too_many_requests")
            go_on.set()

    play(scene)


def test_one_token_cannot_fill_a_small_stream_of_bodies(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        role, begun, go_on = held_role()
        large = {"unknown": "x" * 900_000}
        # The stream of bodies has 2 MiB, of which a token may have 1.35.
        await fleet.make(max_bytes=8 << 20)
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(fleet.gateway(tokens=TOKENS))
            await stack.enter_async_context(fleet.worker("w1", role))
            fleet.session.headers.update(authorize(MINE))
            await fleet.know(url, 1)
            link = await operate(stack, fleet)

            async def count() -> int:
                return (await link.streams.stream_info(link.names.bodies)).state.bytes

            mine = asyncio.create_task(fleet.ask(url, "mine", **large))
            await begun.wait()
            status, value = await fleet.ask(url, "more", **large)
            code = "too_many_bytes_in_requests_in_progress"
            assert (status, value["error"]["code"]) == (429, code)
            headers = authorize(THEIRS)
            theirs = [
                asyncio.create_task(fleet.ask(url, "a", headers=headers)),
                asyncio.create_task(
                    fleet.ask(url, "large", headers=headers, unknown="x" * 500_000)
                ),
            ]
            go_on.set()
            assert [status for status, _ in await asyncio.gather(mine, *theirs)] == [200] * 3

            async def is_empty() -> bool:
                return not await count()

            await until_async(is_empty)

    play(scene)


def test_the_server_counts_no_bytes_that_were_removed(play_quietly: Play) -> None:
    """A server stops to store anything once what it counts has reached max_file_store."""

    async def scene(fleet: FleetRun) -> None:
        large = {"unknown": "x" * 900_000}
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(fleet.gateway(tokens=TOKENS))
            await stack.enter_async_context(fleet.worker("w1", ScriptedRole(prompt_as_picture)))
            fleet.session.headers.update(authorize(MINE))
            await fleet.know(url, 1)
            link = await operate(stack, fleet)

            async def count_lost() -> int:
                streams = await link.streams.streams_info()
                stored = sum(stream.state.bytes for stream in streams)
                return (await link.streams.account_info()).storage - stored

            before = await count_lost()
            for number in range(3):
                status, _ = await fleet.ask(url, "large", seed=number, **large)
                assert status == 200
            _, file = await upload(fleet, url, MINE, 100_000)
            async with fleet.session.delete(f"{url}/v1/files/{file['id']}") as answer:
                assert answer.status == 200

            async def is_as_before() -> bool:
                streams = [link.names.bodies, link.names.logs]
                infos = [await link.streams.stream_info(stream) for stream in streams]
                return not any(info.state.bytes for info in infos)

            await until_async(is_as_before)
            assert await count_lost() == before

    play_quietly(scene)

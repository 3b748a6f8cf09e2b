"""Jobs of a fleet from request to response, with workers whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.api.answer_stream import NdjsonStream
from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.gateway import response_relay
from clowder_aimage.fleet.gateway.continuation import NDJSON, SSE
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.response_writer import ResponseWriter
from clowder_aimage.http.route import ADMIN, Role, Route, SharedRoute
from tests.fleet.fleet_run import (
    PICTURES,
    FleetRun,
    ScriptedRole,
    no_jobs,
    prompt_as_picture,
)

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

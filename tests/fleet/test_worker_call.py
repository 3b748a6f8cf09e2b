"""Requests of a gateway to workers without jobs: signs of life, large responses, new models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.api.ollama import routes as ollama_routes
from clowder_aimage.api.service import Service
from clowder_aimage.fleet.gateway import worker_call
from clowder_aimage.fleet.job import request as job_request
from clowder_aimage.fleet.job.request import ALIVE, PART
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN, INFER, Role, Route, SharedHandler, SharedRoute
from tests.fleet.fleet_run import FleetRun

pytestmark = pytest.mark.integration
Play = Callable[..., None]


class OneRoute(Role):
    """A worker with one route."""

    def __init__(self, method: str, path: str, answer: SharedHandler) -> None:
        self._route = method, path, answer

    def build_routes(self) -> list[Route]:
        return [SharedRoute(*self._route, INFER if self._route[0] == "GET" else ADMIN)]


def test_a_call_lasts_as_long_as_its_worker_gives_signs_of_life(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was killed in the middle, and has begun again, gives none."""
    monkeypatch.setattr(job_request, "SIGN", 0.02)

    async def scene(fleet: FleetRun) -> None:
        begun, signs = asyncio.Event(), asyncio.Semaphore(0)

        async def copy(_: Request) -> web.Response:
            begun.set()
            for _sign in range(3):
                await signs.acquire()
            return web.json_response({"copied": True})

        async with (
            fleet.gateway() as url,
            fleet.worker("w", OneRoute("POST", "/api/copy", copy)) as w,
        ):
            tell = w._link.publish

            async def observed(subject: str, data: bytes = b"", headers: Any = None) -> None:
                await tell(subject, data, headers)
                if (headers or {}).get(PART) == ALIVE:
                    signs.release()

            monkeypatch.setattr(w._link, "publish", observed)
            await fleet.know(url, 1)
            body = {"source": "a", "destination": "b"}
            async with fleet.session.post(f"{url}/api/copy", json=body) as answer:
                assert (answer.status, await answer.json()) == (200, {"copied": True})
            monkeypatch.setattr(worker_call, "SILENCE", 0.2)
            monkeypatch.setattr(w._link, "publish", tell)
            begun.clear()
            asked = asyncio.create_task(fleet.session.post(f"{url}/api/copy", json=body))
            await begun.wait()
            for task in w._tasks:  # as if its process had been killed
                task.cancel()
            async with await asked as answer:
                assert answer.status == 504 and "no worker responded" in await answer.text()
            assert len((await fleet.status(url))["workers"]) == 1

    play(scene)


def test_a_response_may_be_larger_than_a_message(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        text = "picture " * 500_000

        async def show(_: Request) -> web.Response:
            model = {"id": text, "object": "model", "created": 0, "owned_by": "me"}
            return web.json_response(model)

        role = OneRoute("GET", "/v1/models/{id}", show)
        async with fleet.gateway() as url, fleet.worker("w", role):
            await fleet.know(url, 1)
            async with fleet.session.get(f"{url}/v1/models/x") as answer:
                assert answer.status == 200 and (await answer.json())["id"] == text
            body = '{"model": "%s"}' % ("é" * 400_000)  # of which a message needs six bytes each
            kind, data = {"Content-Type": "application/json"}, body.encode()
            async with fleet.session.post(f"{url}/api/show", data=data, headers=kind) as answer:
                assert answer.status == 413 and "raise max_payload" in await answer.text()

    play(scene)


def test_a_gateway_knows_what_it_changed_before_it_answers(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(fleet: FleetRun) -> None:
        def copying(service: Service) -> Role:
            return OneRoute("POST", "/api/copy", partial(ollama_routes._copy, service))

        async def nothing() -> None:
            pass

        async with fleet.gateway() as url, fleet.worker("w", copying) as w:
            await fleet.know(url, 1)
            monkeypatch.setattr(
                w, "_publish_status", nothing
            )  # the reports of this worker are late
            body = {"source": "tiny", "destination": "copy"}
            async with fleet.session.post(f"{url}/api/copy", json=body) as answer:
                assert answer.status == 200, await answer.text()
            (status,) = (await fleet.status(url))["workers"]
            assert set(status["models"]) == {"tiny:latest", "copy:latest"}

    play(scene)

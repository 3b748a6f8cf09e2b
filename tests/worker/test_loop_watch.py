"""The watch over the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.http import background, loop_watch
from clowder_aimage.http.background import run_in_background
from tests import conftest


def compute() -> None:
    began = time.thread_time()
    while time.thread_time() - began < 0.06:  # five times BLOCKED is allowed under coverage
        sum(range(1000))


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "BLOCKED", 0.01)
    monkeypatch.setattr(conftest, "measure_slowness", lambda: 1.0)


def ask(handler: Any) -> int:
    app = web.Application(middlewares=[loop_watch.watch_requests])
    app.router.add_get("/work/{name}", handler)

    async def main() -> int:
        async with TestClient(TestServer(app)) as client, client.get("/work/x") as answer:
            return answer.status

    return asyncio.run(main())


def test_a_request_that_computes_is_reported(loop_blocks: list[str]) -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(0)
        compute()
        return web.Response()

    assert ask(handler) == 200
    assert [each.partition(":")[0] for each in loop_blocks] == ["GET /work/{name}"]
    loop_blocks.clear()


def test_waiting_and_other_threads_are_not_reported() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.get_running_loop().run_in_executor(None, compute)
        raise web.HTTPGone

    assert ask(handler) == 410


def test_background_work_is_reported(loop_blocks: list[str]) -> None:
    done = asyncio.Event()

    async def work() -> None:
        try:
            compute()
            done.set()
            await asyncio.sleep(60)
        finally:
            loop_blocks.append("ended: cancelled")

    async def main() -> None:
        async with run_in_background(work()):
            await done.wait()

    asyncio.run(main())
    assert [each.rpartition(":")[0].rpartition(".")[2] for each in loop_blocks] == ["work", "ended"]
    loop_blocks.clear()


def test_background_work_that_never_begins_ends() -> None:
    async def main() -> None:
        async with run_in_background(asyncio.sleep(60)):
            pass

    asyncio.run(main())


def test_background_work_that_loses_a_cancellation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN", 0.01)
    ended = list[bool]()

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):  # as wait_for of Python 3.11 may do
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main() -> None:
        async with run_in_background(deaf()):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert ended

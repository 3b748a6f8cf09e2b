"""The admission of pictures: those of slow and of departed clients leave room for others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api.picture import body as picture_body
from clowder_aimage.api.picture.body import GRACE, MIN_SPEED, TIMEOUT, PictureBody
from clowder_aimage.api.picture.upload import PictureUpload, PictureUploads
from clowder_aimage.engine.admission import CALLER, CallerSemaphore
from clowder_aimage.engine.executor import run_locking
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.operation import BODY
from tests.wait import until_async

FORM = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
HEADERS = {"Content-Type": "multipart/form-data; boundary=x"}


def test_a_caller_has_its_share_of_what_is_done_at_once() -> None:
    inside = list[str]()

    async def work(busy: CallerSemaphore, caller: str, end: asyncio.Event) -> None:
        CALLER.set(caller)
        async with busy:
            inside.append(caller)
            try:
                await end.wait()
            finally:
                inside.remove(caller)

    async def see(count: int, *callers: str) -> list[str]:
        busy, end = CallerSemaphore(count), asyncio.Event()
        tasks = [asyncio.create_task(work(busy, caller, end)) for caller in callers]
        await asyncio.sleep(0.01)
        seen = sorted(inside)
        # One that leaves while it waits takes no turn with it
        tasks[-2].cancel()
        end.set()
        await asyncio.wait(tasks)
        assert not inside
        assert not busy._all.locked()
        return seen

    async def main() -> None:
        assert await see(2, *"aaab") == ["a", "b"]
        assert await see(4, *"aaaab") == ["a", "a", "a", "b"]
        assert await see(2, "", "", "") == ["", ""]

    asyncio.run(main())


def test_decoding_for_clients_that_left_stops_no_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as places: those that have not begun never do, and records are written meanwhile."""
    end, begun = threading.Event(), list[str]()

    def store(_: PictureUpload, name: str, *more: object) -> None:
        begun.append(name)
        end.wait(30)

    monkeypatch.setattr(PictureUpload, "_store", store)
    anything: Any = SimpleNamespace()

    async def main() -> None:
        uploads = PictureUploads(anything)
        upload = [PictureUpload(uploads, anything, anything) for _ in range(11)]
        try:
            tasks = [asyncio.create_task(each._keep("image", b"", "white")) for each in upload]
            await until_async(lambda: len(begun) == 2)
            for task in tasks:
                task.cancel()
            async with asyncio.timeout(60):
                assert await run_locking(int, "1") == 1
        finally:
            end.set()
        await asyncio.wait(tasks)
        assert len(begun) == 2

    asyncio.run(main())


def test_a_server_that_ends_reports_no_upload_that_still_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end, begun, errors = threading.Event(), threading.Event(), list[object]()

    def remove(*_: object) -> None:
        begun.set()
        end.wait(30)

    monkeypatch.setattr(PictureUploads, "_end", remove)
    anything: Any = SimpleNamespace(store=SimpleNamespace(lease=lambda: None))

    async def serve() -> None:
        async with PictureUploads(anything).open(anything) as upload:
            upload.body.is_counted = True

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        task = loop.create_task(serve())
        loop.run_until_complete(until_async(begun.is_set))
        loop.run_until_complete(loop.shutdown_asyncgens())
        end.set()
        loop.run_until_complete(asyncio.wait([task]))
    finally:
        end.set()
        loop.close()
    assert not errors


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (1, GRACE),
        (MIN_SPEED, GRACE + 1),
        (20 * MIN_SPEED, GRACE + 20),
        (1000 * MIN_SPEED, TIMEOUT),
    ],
)
def test_a_body_keeps_its_place_while_it_arrives(size: int, seconds: float) -> None:
    due = list[float]()
    request: Any = {"body": set()}
    limit: Any = SimpleNamespace(reschedule=due.append)
    gate: Any = SimpleNamespace(enter=lambda: None)

    async def main() -> None:
        body = PictureBody(request, gate)
        body.enter()
        now = asyncio.get_running_loop().time()
        body._take(size, limit)
        assert due[0] - now == pytest.approx(seconds, abs=1)

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"first": b"", "headers": HEADERS},
        {"first": b"--x\r\n", "headers": HEADERS},
        {"first": FORM, "headers": HEADERS},
        {"first": FORM + b"abc", "headers": HEADERS},
        {"first": b"{" + b" " * BODY, "headers": {"Content-Type": "application/json"}},
    ],
)
def test_a_body_that_stands_still_loses_its_place(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_body, "GRACE", 0.2)
    monkeypatch.setattr(picture_body, "MIN_SPEED", 1 << 30)
    gate: Any = SimpleNamespace(busy=CallerSemaphore(2), enter=lambda: None)
    statuses = list[int]()

    async def answer(request: web.Request) -> web.StreamResponse:
        request["body"] = set()
        try:
            await PictureBody(request, gate).read_fields(may_be_form=True)
        except ApiError as error:
            statuses.append(error.status)
        return web.Response()

    async def drip() -> AsyncIterator[bytes]:
        yield options["first"]
        await asyncio.sleep(60)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/", answer)
        async with TestClient(TestServer(app)) as client:
            asking = asyncio.create_task(client.post("/", data=drip(), headers=options["headers"]))
            await until_async(lambda: bool(statuses))
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asking

    asyncio.run(main())
    assert statuses == [408]

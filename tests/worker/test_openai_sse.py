"""Server-sent events: framing, keep-alive comments and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from clowder_aimage.api import answer_stream
from clowder_aimage.errors import UsageError


def test_a_frame_has_event_data_and_id_lines() -> None:
    data = {"step": 1, "total": 30}
    assert (
        answer_stream.encode_event("progress", data)
        == b'event: progress\ndata: {"step": 1, "total": 30}\n\n'
    )
    assert answer_stream.encode_event(None, {}, mark="7") == b"id: 7\ndata: {}\n\n"


def test_line_breaks_in_text_do_not_end_a_frame() -> None:
    assert (
        answer_stream.encode_event("a", "x\n\nevent: b")
        == b"event: a\ndata: x\ndata: \ndata: event: b\n\n"
    )
    assert answer_stream.encode_event("a", {"x": "\r\n\u2028"}).count(b"\n") == 3
    assert answer_stream.encode_comment("one\ntwo\r\n\r\ndata: x") == b": one two data: x\n\n"
    with pytest.raises(ValueError, match="invalid event name"):
        answer_stream.encode_event("a\nb", {})


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        answer_stream.encode_event("a", {"x": float("nan")})


def test_ticking_yields_none_during_silence() -> None:
    async def play() -> list[int | None]:
        gate = asyncio.Event()

        async def events() -> AsyncGenerator[int, None]:
            yield 1
            await gate.wait()
            yield 2

        seen: list[int | None] = []
        async for event in answer_stream.with_keepalive(events(), 0.001):
            seen.append(event)
            if seen.count(None) == 3:
                gate.set()
        return seen

    seen = asyncio.run(play())
    assert [event for event in seen if event] == [1, 2]
    assert seen[:4] == [1, None, None, None]


def test_closing_ticking_waits_for_the_generators_end() -> None:
    async def play() -> list[str]:
        ended: list[str] = []

        async def events() -> AsyncGenerator[int, None]:
            try:
                yield 1
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # cleanup yields to the event loop
                ended.append("ended")

        async with contextlib.aclosing(answer_stream.with_keepalive(events())) as coming:
            await anext(coming)
        return ended

    assert asyncio.run(play()) == ["ended"]


def test_ticking_reraises_the_generators_error() -> None:
    async def play() -> list[int | None]:
        async def events() -> AsyncGenerator[int, None]:
            yield 1
            raise UsageError("broken")

        seen = []
        with pytest.raises(UsageError, match="broken"):
            async for event in answer_stream.with_keepalive(events()):
                seen.append(event)
        return seen

    assert asyncio.run(play()) == [1]


def served(
    talk: Callable[[answer_stream.EventStream], Coroutine[Any, Any, None]],
    listen: Callable[[Any], Coroutine[Any, Any, Any]],
    clock: Callable[[], float],
) -> tuple[Any, list[BaseException]]:
    """Run ``talk`` on a stream that ``listen`` reads; return the result and the errors."""
    failed: list[BaseException] = []
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        stream = answer_stream.EventStream(request, {"X-More": "1"}, clock=clock)
        try:
            await stream.open()
            await talk(stream)
            return await stream.close()
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            over.set()

    async def run() -> Any:
        app = web.Application()
        app.router.add_get("/", answer)
        async with TestServer(app) as server, ClientSession() as client:
            async with client.get(server.make_url("/")) as response:
                found = await listen(response)
                await asyncio.wait_for(over.wait(), 30)
            return found

    return asyncio.run(run()), failed


def test_a_keep_alive_comment_is_sent_only_after_silence() -> None:
    now = [0.0]

    async def talk(stream: answer_stream.EventStream) -> None:
        for passed in (answer_stream.KEEP_ALIVE - 1, 1, 1, answer_stream.KEEP_ALIVE - 1):
            now[0] += passed
            await stream.keep_alive()

    async def listen(response: Any) -> bytes:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["X-More"] == "1"
        return await response.read()

    text, failed = served(talk, listen, lambda: now[0])
    assert text == b": keep-alive\n\n" * 2
    assert not failed
    assert answer_stream.KEEP_ALIVE < 15


def test_events_are_flushed_at_once() -> None:
    heard = asyncio.Event()

    async def talk(stream: answer_stream.EventStream) -> None:
        await stream.send(answer_stream.encode_event("one", 1))
        await asyncio.wait_for(heard.wait(), 30)  # the second event waits for the first
        await stream.send(answer_stream.encode_event("two", 2))

    async def listen(response: Any) -> bytes:
        first = await response.content.readuntil(b"\n\n")
        heard.set()
        return first + await response.read()

    text, failed = served(talk, listen, lambda: 0.0)
    assert (text, failed) == (b"event: one\ndata: 1\n\nevent: two\ndata: 2\n\n", [])


def test_a_disconnected_client_is_noticed_without_sending() -> None:
    async def talk(stream: answer_stream.EventStream) -> None:
        while True:
            await stream.keep_alive()
            await asyncio.sleep(0)

    async def listen(response: Any) -> None:
        response.close()

    _, failed = served(talk, listen, lambda: 0.0)
    assert isinstance(failed[0], ConnectionResetError)


def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_stream, "STALL", 0.2)

    async def talk(stream: answer_stream.EventStream) -> None:
        await stream.send(b"x" * (64 << 20))

    async def listen(response: Any) -> None:
        pass

    _, failed = served(talk, listen, lambda: 0.0)
    assert isinstance(failed[0], ConnectionResetError)
    assert "stopped reading" in str(failed[0])

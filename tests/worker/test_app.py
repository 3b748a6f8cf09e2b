"""The HTTP application: request bodies, error responses, timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.api.answer_stream import EventStream, NdjsonStream
from clowder_aimage.api.service import Service

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.engine.admission import (
    BusyError,
    ComputeDeadlineError,
    DeadlineError,
    DiedError,
    StoppedError,
)
from clowder_aimage.engine.settings import Settings
from clowder_aimage.errors import (
    ChatTemplateError,
    FormatError,
    ModelError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UnauthorizedError,
    UnrunnableError,
    UsageError,
    VerificationError,
)
from clowder_aimage.http import app, connection, server
from clowder_aimage.http.api_error import convert_error
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.route import Role, Route
from clowder_aimage.http.server import accepting
from clowder_aimage.layout import ImageLayout
from clowder_aimage.registry import ClientOptions

SECRET = "a lighthouse that nobody may know of"


class Routes(WorkerRole):
    """A worker role with custom routes."""

    def __init__(self, service: Service, *routes: Route) -> None:
        super().__init__(service)
        self._routes = list(routes)

    def build_routes(self) -> list[Route]:
        return self._routes


def talked(role: WorkerRole, talk: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of ``talk(client)`` for a client of the role's application."""

    async def run() -> Any:
        async with asyncio.timeout(60), TestClient(TestServer(app.build_app(role))) as client:
            return await talk(client)

    return asyncio.run(run())


@pytest.fixture
def failing(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that requests a failing route and returns status, headers and body."""
    service = make_service(Settings(), ImageLayout(tmp_path / "store"), ClientOptions())

    def fail(error: Any, path: str = "/v1/x", **options: Any) -> Any:
        async def handler(request: web.Request) -> NoReturn:
            raise error

        async def talk(client: Any) -> tuple[Any, Any, Any]:
            headers = {"Content-Type": "application/json"}
            answer = await client.post(path, headers=headers, **options)
            return answer.status, answer.headers, await answer.json()

        route = Route("POST", path, handler, "infer", body=1000)
        return talked(Routes(service, route), talk)

    return fail


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BusyError(9, 30), 503, "overloaded"),
        (StoppedError("it was stopped"), 503, "unavailable"),
        (DeadlineError("too long"), 504, "deadline_exceeded"),
        (ComputeDeadlineError("too long"), 504, "deadline_exceeded"),
        (NotFoundError("not here"), 404, "model_not_found"),
        (UsageError("no size", hint="write 16x16"), 400, "invalid_value"),
        (UnauthorizedError("who are you"), 502, "registry_unauthorized"),
        (NoSpaceError("full"), 507, "insufficient_storage"),
        (ModelError("it failed"), 500, "internal_error"),
        (ChatTemplateError("it fails"), 422, "invalid_chat_template"),
        (UnrunnableError("no such network"), 422, "model_not_supported"),
        (DiedError("it died"), 500, "internal_error"),
        (VerificationError("another"), 502, "verification_failed"),
        (FormatError("damaged"), 500, "invalid_content"),
        (json.JSONDecodeError("x", SECRET, 0), 400, "invalid_json"),
        (RecursionError(SECRET), 400, "invalid_json"),
        (ValueError(SECRET), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_error_maps_to_a_status_and_an_error_object(
    failing: Any, capsys: pytest.CaptureFixture[str], error: Any, status: int, code: str
) -> None:
    found, headers, body = failing(error)
    assert found == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, None)
    assert ("Retry-After" in headers) == (status == 503)
    is_final = isinstance(error, ComputeDeadlineError | DiedError)
    assert headers.get("X-Should-Retry") == ("false" if is_final else None)
    said = capsys.readouterr()
    assert SECRET not in json.dumps(body) + said.out + said.err


def test_errors_of_ollama_routes_have_ollamas_format(failing: Any) -> None:
    found, headers, body = failing(BusyError(9, 30), "/api/x")
    assert (found, headers["Retry-After"]) == (503, "30")
    assert body == {"error": "the queue is full: 9 requests are waiting", "code": "overloaded"}


def test_a_stalled_body_times_out_with_408(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    assert failing(ValueError(), data=never())[0] == 408


def test_the_body_limit_of_a_route_is_enforced(failing: Any) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 600
        yield b"x" * 401

    assert failing(ValueError(), data=b"x" * 1001)[0] == 413
    assert failing(ValueError(), data=chunks())[0] == 413
    assert failing(ValueError(), data=b"x" * 1000)[0] == 500


def test_a_handler_that_fails_midway_truncates_the_response(tmp_path: Path) -> None:
    service = make_service(Settings(), ImageLayout(tmp_path / "store"), ClientOptions())

    async def handler(request: web.Request) -> NoReturn:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"half")
        raise ValueError(SECRET)

    async def talk(client: Any) -> str:
        answer = await client.get("/x")
        with pytest.raises(ClientError):
            await answer.read()
        return service.metrics.format_text().decode()

    text = talked(Routes(service, Route("GET", "/x", handler, "infer")), talk)
    assert 'route="/x"' in text


@pytest.mark.parametrize("is_json", [False, True])
def test_a_client_that_leaves_after_the_end_has_had_its_answer(
    tmp_path: Path, is_json: bool
) -> None:
    """Handlers of streams clean up after the last byte."""
    service = make_service(Settings(), ImageLayout(tmp_path / "store"), ClientOptions())
    left = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = NdjsonStream(request) if is_json else EventStream(request)
        if isinstance(stream, EventStream):
            await stream.open()
            await stream.close()
        else:
            await stream.write({})
            await stream.end()
        try:
            return await asyncio.Future()
        finally:
            left.set()

    async def talk(client: Any) -> str:
        answer = await client.get("/x")
        await answer.read()
        await client.close()
        await left.wait()
        while 'route="/x"' not in (text := service.metrics.format_text().decode()):
            await asyncio.sleep(0)
        return str(text)

    text = talked(Routes(service, Route("GET", "/x", handler, "infer")), talk)
    assert 'code="200"' in text and 'code="499"' not in text


def test_error_messages_contain_no_local_paths() -> None:
    said = convert_error(StoreError("cannot write /srv/secret/blobs"))
    assert (said.status, said.message) == (503, "cannot access the store")


def test_a_draining_worker_refuses_pulls_and_serves_reads(tmp_path: Path) -> None:
    service = make_service(Settings(), ImageLayout(tmp_path / "store"), ClientOptions())
    service.engine.is_draining = True

    async def talk(client: Any) -> tuple[Any, Any, Any, Any]:
        refused = await client.post("/api/pull", json={"model": "localhost:1/a"})
        seen = await client.get("/api/version")
        return refused.status, refused.headers["Retry-After"], seen.status, seen.headers

    status, after, seen, headers = talked(WorkerRole(service), talk)
    assert (status, after, seen, headers["Connection"]) == (503, "5", 200, "close")


def test_a_stalled_request_head_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS", 0.05)
    monkeypatch.setattr(server, "INTERVAL", 0.01)
    places = listen("127.0.0.1:0", has_tokens=False)

    async def talk() -> None:
        async with asyncio.timeout(60), accepting(app.build_app(Role()), places):
            host, port = places.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: local")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(talk())
    places.close()


def test_a_client_that_stops_reading_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE", 0.05)
    monkeypatch.setattr(server, "INTERVAL", 0.01)
    service = make_service(Settings(), ImageLayout(tmp_path / "store"), ClientOptions())
    places = listen("127.0.0.1:0", has_tokens=False)
    is_over = asyncio.Event()

    async def handler(request: web.Request) -> NoReturn:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"x" * 65536)
        finally:
            is_over.set()

    async def talk() -> None:
        built = app.build_app(Routes(service, Route("GET", "/x", handler, "infer")))
        async with asyncio.timeout(60), accepting(built, places):
            with socket.create_connection(places.sockets[0].getsockname()) as client:
                client.sendall(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await is_over.wait()

    asyncio.run(talk())
    places.close()


class Slow:
    """A connection with ``waiting`` bytes in its write buffer."""

    def __init__(self) -> None:
        self.transport, self.waiting, self.is_aborted = self, 0, False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.is_aborted = True


def test_a_slow_client_is_not_disconnected() -> None:
    now = [0.0]
    watch, slow, stopped = server.WriteTimeout(lambda: now[0]), Slow(), Slow()
    for size in range(100, 90, -1):
        slow.waiting, stopped.waiting = size, 5000
        watch.check([slow, stopped])  # type: ignore[list-item]
        now[0] += server.WRITE / 5
    assert (slow.is_aborted, stopped.is_aborted) == (False, True)

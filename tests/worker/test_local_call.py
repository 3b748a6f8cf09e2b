"""Calls of routes without HTTP: paths, scopes, limits, streams and their failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.api.answer_stream import EventStream, NdjsonStream
from clowder_aimage.api.request_body import read_checked
from clowder_aimage.errors import AImageError, NetworkError
from clowder_aimage.http.local_call import LocalCalls, get_body
from clowder_aimage.http.local_request import LocalRequest, Request
from clowder_aimage.http.route import ADMIN, INFER, OPEN, Role, Route, SharedRoute


class Collected:
    """A sink that keeps a stream; it fails at the write number ``fails``."""

    def __init__(self, fails: int = 0) -> None:
        self.status, self.pieces, self._fails = 0, list[bytes](), fails

    async def begin(self, response: web.StreamResponse) -> None:
        self.status = response.status

    async def write(self, data: bytes) -> None:
        self.pieces.append(data)
        if len(self.pieces) == self._fails:
            raise NetworkError("the receiver has gone")


async def show(request: Request) -> web.StreamResponse:
    facts = [request.match_info["id"], request.query.get("a"), request.headers.get("Accept")]
    return web.json_response(facts)


async def echo(request: Request) -> web.StreamResponse:
    return web.json_response(await read_checked(request, dict))


async def events(request: Request) -> web.StreamResponse:
    stream = EventStream(request)
    await stream.open()
    await stream.send(b"a", b"b")
    return await stream.close()


async def lines(request: Request) -> web.StreamResponse:
    stream = NdjsonStream(request)
    await stream.write({"a": 1})
    return await stream.fail(AImageError("late"))


async def broken(request: Request) -> web.StreamResponse:
    await EventStream(request).open()
    raise ValueError


class Routes(Role):
    is_ending = False

    @property
    def is_draining(self) -> bool:
        return self.is_ending

    def build_routes(self) -> list[Route]:
        streams = {"/events": events, "/api/lines": lines, "/broken": broken}
        return [
            SharedRoute("GET", "/v1/models/{id:.+}", show, INFER),
            SharedRoute("GET", "/one/{id}", show, OPEN),
            SharedRoute("POST", "/echo", echo, INFER, body=100),
            SharedRoute("DELETE", "/admin", echo, ADMIN),
            *(SharedRoute("POST", path, each, INFER) for path, each in streams.items()),
            Route("GET", "/http", show, INFER),
        ]


def send(method: str, target: str, scope: str = INFER, **options: Any) -> tuple[int, Any]:
    request = LocalRequest(method, target, scope=scope, **options)
    response = asyncio.run(LocalCalls(Routes()).send(request))
    return response.status, json.loads(get_body(response))


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("/v1/models/host/a%20b:c?a=1%2B", ["host/a b:c", "1+", "text"]),
        ("/one/a%2Fb", ["a/b", None, "text"]),
        ("/one/a?a=", ["a", "", "text"]),
    ],
)
def test_a_path_is_decoded(target: str, value: list[str]) -> None:
    assert send("GET", target, headers={"accept": "text"}) == (200, value)


@pytest.mark.parametrize(
    ("method", "target", "scope", "code"),
    [
        ("GET", "/none", ADMIN, (404, "unknown_url")),
        ("GET", "/one/a/b", ADMIN, (404, "unknown_url")),
        ("POST", "/one/a", ADMIN, (404, "unknown_url")),
        ("GET", "/http", ADMIN, (404, "unknown_url")),  # a route that needs a connection
        ("DELETE", "/admin", INFER, (403, "insufficient_scope")),
        ("DELETE", "/admin", "other", (403, "insufficient_scope")),
        ("POST", "/echo", INFER, (400, "invalid_json")),  # without a body
        ("POST", "/events", INFER, (400, None)),  # without a receiver
    ],
)
def test_an_error_has_the_form_of_the_interface(
    method: str, target: str, scope: str, code: tuple[int, str | None]
) -> None:
    status, value = send(method, target, scope)
    assert (status, value["error"]["code"]) == code


def test_a_body_is_limited_by_its_size_as_json() -> None:
    fields = {"text": "é" * 40}
    assert send("POST", "/echo", fields=fields, size=10_000) == (200, fields)
    status, value = send("POST", "/echo", fields={"text": "é" * 50}, size=10_000)
    assert (status, value["error"]["code"]) == (413, "too_large")


def test_new_work_is_refused_during_a_shutdown() -> None:
    role = Routes()
    role.is_ending = True

    async def play() -> list[int]:
        calls = LocalCalls(role)
        asked = [
            LocalRequest(*each, scope=ADMIN) for each in (("GET", "/one/a"), ("POST", "/echo"))
        ]
        return [(await calls.send(each)).status for each in asked]

    assert asyncio.run(play()) == [200, 503]


def stream(path: str, sink: Collected) -> web.StreamResponse:
    request = LocalRequest("POST", path, scope=INFER, sink=sink)
    return asyncio.run(LocalCalls(Routes()).send(request))


def test_a_stream_is_written_to_the_sink() -> None:
    for path, pieces in ("/events", [b"a", b"b"]), ("/api/lines", [b'{"a":1}\n']):
        sink = Collected()
        response = stream(path, sink)
        assert (sink.status, response.status, get_body(response)) == (200, 200, b"")
        assert sink.pieces[: len(pieces)] == pieces
    assert json.loads(sink.pieces[-1])["error"] == "late"


def test_a_failure_of_the_sink_is_not_an_event_of_the_stream() -> None:
    for path in ("/events", "/api/lines"):
        sink = Collected(fails=1)
        with pytest.raises(NetworkError, match="has gone"):
            stream(path, sink)
        assert len(sink.pieces) == 1


def test_a_stream_that_breaks_off_does_not_appear_complete() -> None:
    with pytest.raises(ConnectionError, match="aborted"):
        stream("/broken", Collected())

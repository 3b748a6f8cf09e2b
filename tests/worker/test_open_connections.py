"""Connections: how long they may wait, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from clowder_aimage.http import connection
from clowder_aimage.http.app import build_app
from clowder_aimage.http.connection import ConnectionLimit, IdleTimeout, find_client
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.route import Role
from clowder_aimage.http.server import accepting


class Client:
    """The part of an aiohttp connection that the code under test reads."""

    def __init__(self) -> None:
        self.is_closed = False

    @property
    def transport(self) -> Client:
        return self

    def abort(self) -> None:
        self.is_closed = True


class World:
    """A client of a server, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idle = IdleTimeout(lambda: self.now)
        self.client: Any = Client()
        self.check()

    def check(self) -> None:
        self.idle.check([self.client])

    def send(self) -> None:
        self.idle.receive(self.client)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.check()

    def drip(self, seconds: int) -> None:
        """Send a byte each second."""
        for _ in range(seconds):
            self.send()
            self.wait(1)

    def ask(self, seconds: int) -> None:
        """Send a whole request, which takes some seconds."""
        self.send()

        async def serve(_: object) -> Any:
            self.wait(seconds)

        async def handle() -> None:
            request: Any = type("Request", (), {"protocol": self.client})
            await self.idle.middleware(request, serve)

        asyncio.run(handle())


HEADERS, IDLE = int(connection.HEADERS), int(connection.IDLE)
# What a client does, with its seconds, and whether it is disconnected
CLIENTS: list[tuple[list[tuple[str, int]], bool]] = [
    ([("wait", HEADERS - 1)], False),
    ([("wait", HEADERS + 1)], True),
    ([("drip", HEADERS - 1)], False),
    ([("drip", HEADERS + 1)], True),
    ([("drip", HEADERS - 2), ("ask", 0), ("wait", IDLE - 1)], False),
    ([("ask", 0), ("wait", IDLE - 1)], False),
    ([("ask", 0), ("wait", IDLE + 1)], True),
    ([("ask", 0), ("wait", IDLE - 5), ("drip", HEADERS - 1)], False),
    ([("ask", 0), ("drip", HEADERS + 1)], True),
    ([("ask", 0), ("wait", 20), ("drip", HEADERS + 1)], True),
    ([("ask", 600)], False),
    ([("ask", 0), ("wait", IDLE - 1)] * 5, False),
]


@pytest.mark.parametrize(("steps", "is_closed"), CLIENTS)
def test_a_connection_waits_for_a_request(steps: list[tuple[str, int]], is_closed: bool) -> None:
    world = World()
    for step, seconds in steps:
        getattr(world, step)(seconds)
    assert world.client.is_closed is is_closed


def test_idle_timeout_is_shorter_with_many_connections() -> None:
    now = [0.0]
    idle = IdleTimeout(lambda: now[0])
    crowd: Any = [Client() for _ in range(connection.CROWD + 1)]
    few = crowd[:3]
    idle.check(few)
    now[0] = connection.IDLE_IN_CROWD + 1
    idle.check(few)
    assert not any(each.is_closed for each in few)
    idle.check(crowd)
    assert [each.is_closed for each in crowd] == [True] * 3 + [False] * (len(crowd) - 3)


def test_one_address_leaves_connections_to_others() -> None:
    limit = ConnectionLimit(8)
    assert [limit.add("192.0.2.1") for _ in range(9)] == [True] * 6 + [False] * 3
    assert [limit.add("192.0.2.2") for _ in range(3)] == [True, True, False]
    limit.remove("192.0.2.1")
    assert [limit.add("192.0.2.1"), limit.add("")] == [True, False]


def test_a_unix_socket_has_all_connections() -> None:
    limit = ConnectionLimit(4)
    assert [limit.add("") for _ in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("descriptors", "most"),
    [(80, 40), (256, 128), (1024, 768), (65536, 4096), (resource.RLIM_INFINITY, 4096)],
)
def test_descriptors_are_left_to_all_else(
    descriptors: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    limit = ConnectionLimit.of_process()
    assert sum(limit.add("") for _ in range(5000)) == most


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("192.0.2.1", 5), "192.0.2.1"),
        (("::ffff:192.0.2.1", 5, 0, 0), "192.0.2.1"),
        (("2001:db8:0:1:2::3", 5, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
        (("@x", 5), ""),
    ],
)
def test_the_address_of_a_client(peer: object, client: str) -> None:
    assert find_client(peer) == client


def test_too_many_connections_are_refused_until_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ConnectionLimit, "of_process", classmethod(lambda cls: cls(4)))
    places = listen("127.0.0.1:0", has_tokens=False)
    host, port = places.sockets[0].getsockname()
    request = b"GET /absent HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def ask(stack: contextlib.AsyncExitStack) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        stack.callback(writer.close)
        writer.write(request)
        with contextlib.suppress(ConnectionError):
            return await reader.readline()
        return b""

    async def talk() -> None:
        async with asyncio.timeout(60), accepting(build_app(Role()), places):
            async with contextlib.AsyncExitStack() as stack:
                found = [await ask(stack) for _ in range(3)]
                assert found == [b"HTTP/1.1 404 Not Found\r\n"] * 3
                # The client may be reset before it has read
                assert await ask(stack) in (b"HTTP/1.1 503 Service Unavailable\r\n", b"")
            answer = b""
            while b"404" not in answer:
                async with contextlib.AsyncExitStack() as stack:
                    answer = await ask(stack)

    asyncio.run(talk())
    places.close()

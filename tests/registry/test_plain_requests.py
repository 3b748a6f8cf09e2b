"""Requests over idle connections: as urllib3 sends them, and with its errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
from urllib3.exceptions import ProtocolError, ReadTimeoutError

from clowder_aimage.registry.connection import BodilessResponse, ResponseHeaders, set_pools

HEADERS = {"User-Agent": "aimage", "Accept-Encoding": "identity"}
TIMEOUT = urllib3.Timeout(connect=5, read=5)
EMPTY = b"HTTP/1.1 202 Accepted\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"
BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"


class Server:
    """A server that answers request after request of each connection; None ends it."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self._answers = iter(answers)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.requests: list[bytes] = []
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with client:
                while request := client.recv(65536):
                    self.requests.append(request)
                    answer = next(self._answers)
                    if answer is None:
                        break
                    client.sendall(answer)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def start() -> Iterator[Any]:
    servers = []

    def begin(*answers: bytes | None) -> tuple[Server, Any]:
        servers.append(server := Server(list(answers)))
        manager = urllib3.PoolManager()
        set_pools(manager)
        return server, manager.connection_from_host("127.0.0.1", server.port)

    yield begin
    for server in servers:
        server.close()


def exchange(pool: Any, method: str = "HEAD", timeout: urllib3.Timeout = TIMEOUT) -> Any:
    headers = HEADERS if method in ("HEAD", "GET") else {**HEADERS, "Content-Length": "0"}
    return pool.exchange(method, "/v2/", headers, None, timeout)


def test_responses_without_a_body_leave_their_connection_idle(start: Any) -> None:
    server, pool = start(*[EMPTY] * 4)
    exchange(pool).release_conn()
    for method in ("HEAD", "POST", "HEAD"):
        response = exchange(pool, method)
        assert isinstance(response, BodilessResponse)
        assert (response.status, response.headers["location"]) == (202, "/x")
    assert server.connections == 1
    assert server.requests[1] == server.requests[0]


def test_headers_without_a_body_are_found_in_any_case() -> None:
    headers = ResponseHeaders([("Location", "/a"), ("Link", "<b>"), ("LINK", "<c>")])
    assert headers["location"] == headers.get("LOCATION") == "/a"
    assert dict(headers.items()) == {"Location": "/a", "Link": "<b>, <c>"}
    assert "Range" not in headers
    assert headers.get("Range", "") == ""
    assert {"LOCATION", "Range"} & headers.keys() == {"LOCATION"}


def test_a_body_is_read_from_its_connection(start: Any) -> None:
    server, pool = start(EMPTY, BODY, BODY, EMPTY)
    exchange(pool).release_conn()
    for _ in range(2):
        response = exchange(pool, "GET")
        assert response.read() == b"ab"
        response.release_conn()
    assert exchange(pool).status == 202
    assert server.connections == 1


def test_bytes_after_a_response_without_a_body_do_not_answer_the_next_request(start: Any) -> None:
    _, pool = start(EMPTY, EMPTY + BODY, EMPTY)
    exchange(pool).release_conn()
    response = exchange(pool)
    assert not isinstance(response, BodilessResponse)
    response.read()
    response.release_conn()
    assert exchange(pool, "GET").status == 202


def test_an_ended_connection_is_an_error_and_the_next_request_opens_another(start: Any) -> None:
    server, pool = start(EMPTY, None, EMPTY, EMPTY)
    exchange(pool).release_conn()
    with pytest.raises(ProtocolError, match=r"Connection aborted|Remote end"):
        exchange(pool)
    exchange(pool).release_conn()
    assert exchange(pool).status == 202
    assert server.connections == 2


def test_a_connection_that_ended_while_it_was_idle_is_not_used(start: Any) -> None:
    closing = EMPTY.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    server, pool = start(EMPTY, closing, EMPTY)
    exchange(pool).release_conn()
    exchange(pool).release_conn()
    assert exchange(pool).status == 202
    assert server.connections >= 1
    assert len(server.requests) == 3


def test_no_response_in_time_is_a_read_timeout(start: Any) -> None:
    _, pool = start(EMPTY, b"HTTP/1.1 200", EMPTY)
    exchange(pool).release_conn()
    with pytest.raises(ReadTimeoutError):
        exchange(pool, timeout=urllib3.Timeout(connect=5, read=0.05))


def test_an_unusual_request_is_sent_by_urllib3(start: Any) -> None:
    server, pool = start(EMPTY, EMPTY)
    exchange(pool).release_conn()
    response = pool.exchange("GET", "/v2/", {"X": "caf\xe9"}, None, TIMEOUT)
    assert response.status == 202
    assert b"caf\xe9" in server.requests[1]
    assert server.connections == 1


def test_an_interim_response_precedes_the_final_one(start: Any) -> None:
    _, pool = start(EMPTY, b"HTTP/1.1 100 Continue\r\n\r\n" + BODY)
    exchange(pool).release_conn()
    assert exchange(pool, "GET").read() == b"ab"

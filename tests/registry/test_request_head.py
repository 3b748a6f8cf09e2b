"""Requests that are sent at once have the bytes that urllib3 would send."""

from __future__ import annotations

from http.client import HTTPException
from typing import Any

import pytest
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from clowder_aimage.registry.connection import _build_pool_class

HEADERS = {"User-Agent": "aimage", "Accept-Encoding": "identity", "Accept": "*/*"}
LENGTH = {**HEADERS, "Content-Length": "0"}


class Recorder:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def settimeout(self, _: float) -> None:
        pass

    def gettimeout(self) -> float:
        return 0.0

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        pass


def send(kind: Any, host: str, *request: Any) -> tuple[Any, Any]:
    """Return the connection, and the request line, the sorted headers and the body; or an error."""
    connection = kind(host.rpartition(":")[0], int(host.rpartition(":")[2]))
    connection.sock = recorder = Recorder()
    method, url, headers, *body = request
    try:
        connection.request(method, url, body=body[0] if body else None, headers=headers)
    except (ValueError, HTTPException) as error:
        return connection, type(error)
    head, _, rest = bytes(recorder.sent).partition(b"\r\n\r\n")
    line, *lines = head.split(b"\r\n")
    return connection, (line, sorted(lines), rest)


# Host and port, the request, and whether it is sent at once.
REQUESTS: dict[str, Any] = {
    "a blob": ("registry.test:5000", "GET", "/v2/x/blobs/sha256:ab?a=b", HEADERS, True),
    "HEAD": ("registry.test:80", "HEAD", "/v2/x/blobs/sha256:ab", HEADERS, True),
    "no body": ("registry.test:80", "POST", "/v2/x/blobs/uploads/", LENGTH, True),
    "a body": ("x:80", "PUT", "/x", {**HEADERS, "Content-Length": "2"}, b"ab", True),
    "no length": ("x:80", "PUT", "/x", HEADERS, b"ab", False),
    "an address": ("::1:5000", "GET", "/v2/", HEADERS, False),
    "a full URL": ("proxy.test:80", "GET", "http://x/v2/", HEADERS, False),
    "no encoding": ("x:80", "GET", "/v2/", {"User-Agent": "aimage"}, False),
    "another host": ("x:80", "GET", "/v2/", {**HEADERS, "Host": "y"}, False),
    "chunks": ("x:80", "PUT", "/v2/", {**LENGTH, "Transfer-Encoding": "chunked"}, False),
    "latin": ("x:80", "GET", "/v2/", {**HEADERS, "X-Note": "caf\xe9"}, False),
    "another header": ("x:80", "GET", "/v2/", {**HEADERS, "A": "b\r\nC: d"}, False),
    "another header in a name": ("x:80", "GET", "/v2/", {**HEADERS, "A: b\r\nC": "d"}, False),
    "another request": ("x:80", "GET", "/v2/ HTTP/1.1\r\nA: b", HEADERS, False),
    "a space": ("x:80", "GET", "/v2/a b", HEADERS, False),
    "a method": ("x:80", "GET /x", "/v2/", HEADERS, False),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_the_bytes_of_urllib3(name: str) -> None:
    host, *request, is_plain = REQUESTS[name]
    ours = _build_pool_class(HTTPConnectionPool, {}, None).ConnectionCls
    connection, sent = send(ours, host, *request)
    assert sent == send(HTTPConnection, host, *request)[1]
    assert (connection._sent is not None) == is_plain

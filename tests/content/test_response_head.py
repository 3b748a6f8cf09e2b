"""Heads of responses that are parsed at once mean the same as to http.client."""

from __future__ import annotations

import http.client
import socket
from typing import Any

import pytest

from clowder_aimage.content.timed_response import TimedResponse

PLAIN = {
    "blob": b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 2\r\n",
    "kept": b"HTTP/1.1 206 Partial Content\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n",
    "repeated": b"HTTP/1.1 200 OK\r\nLink: <a>\r\nlink: <b>\r\nContent-Length: 2\r\n",
    "no reason": b"HTTP/1.1 404 \r\nContent-Length: 0\r\n",
    "spaces": b"HTTP/1.1 202  All  right \r\nLocation:\t/x \t\r\nContent-Length:0\r\n",
    "no body": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n",
}
UNUSUAL = {
    "closed": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n",
    "no length": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n",
    "signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n",
    "long length": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 30 + b"\r\n",
    "folded": b"HTTP/1.1 200 OK\r\nX-Note: a\r\n b\r\nContent-Length: 2\r\n",
    "latin": b"HTTP/1.1 200 OK\r\nX-Note: caf\xe9\r\nContent-Length: 2\r\n",
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n",
    "line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n",
    "no name": b"HTTP/1.1 200 OK\r\n: x\r\nContent-Length: 2\r\n",
    "two connections": b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nConnection: close\r\n"
    b"Content-Length: 2\r\n",
}
FIELDS = ("status", "code", "reason", "version", "length", "chunked", "will_close")


def read(kind: type[http.client.HTTPResponse], data: bytes, method: str = "GET") -> Any:
    """Return a response after its head, and the rest of the stream."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        response: Any = kind(ours, method=method)
        response.begin()
        state = {name: getattr(response, name) for name in FIELDS}
        body = None if response.length and response.length > 1000 else response.read()
        response.close()
        return response, {**state, "headers": response.headers.items(), "body": body}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("name", [*PLAIN, *UNUSUAL])
def test_a_head_means_the_same_as_to_http_client(name: str, method: str) -> None:
    end = b"\r\n2\r\nab\r\n0\r\n\r\n" if name == "chunked" else b"\r\nab"
    data = (PLAIN | UNUSUAL)[name] + end
    ours, seen = read(TimedResponse, data, method)
    assert seen == read(http.client.HTTPResponse, data, method)[1]
    assert (ours.pairs is not None) == (name in PLAIN)


@pytest.mark.parametrize("count", [100, 101])
def test_the_number_of_headers_is_limited(count: int) -> None:
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + b"a:\r\n" * (count - 1) + b"\r\n"
    if count == 100:
        assert len(read(TimedResponse, data)[0].headers) == count
        return
    with pytest.raises(http.client.HTTPException):
        read(TimedResponse, data)

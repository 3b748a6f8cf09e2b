"""A faulty proxy in front of a registry: it delays, breaks off and alters, and counts bytes."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.wait import PATIENCE

_BLOCK = 64 * 1024
_HOPS = frozenset({"connection", "keep-alive", "transfer-encoding", "date", "server"})


@dataclass
class Passed:
    """A request, with the bytes received of its body and sent of its response."""

    number: int
    method: str
    path: str
    range: str | None
    connection: int
    sent: int = 0
    received: int = 0
    status: int = 0  # status sent; 0 without a response
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_blob(self) -> bool:
        return self.method == "GET" and "/blobs/" in self.path and not self.is_upload

    @property
    def is_upload(self) -> bool:
        return "/blobs/uploads/" in self.path


@dataclass
class Reply:
    """A response: the registry's, altered by ``change``, or one sent ``instead``.

    With ``after`` it is sent once that many bytes of the request's body arrived, and the
    connection is closed: after the client stops sending, or ``abruptly``.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after: int | None = None
    abruptly: bool = False

    def put(self, body: bytes) -> None:
        """Replace the body and its Content-Length."""
        self.body = body
        self.headers["Content-Length"] = str(len(body))


@dataclass
class Proxy:
    """Forwards every response of ``upstream`` by these rules, which may change at any time.

    ``pace`` is a limit in bytes per second and connection, ``delay`` the time before a response.
    ``cut(passed)`` returns the number of body bytes after which a response breaks off, or
    None; with ``stall`` it stops sending instead. After ``hold`` bytes of blobs, nothing is
    sent until ``release()``. ``ranges`` is the treatment of requests for a part of a
    blob: "kept", "ignored", "wrong" (another part is sent), or an error status.

    ``lost(passed)`` returns the number of bytes of a request's body after which its connection
    is reset, or None; with ``reset``, a response that is ``cut`` ends with a reset.
    ``instead(passed)`` may answer without the registry, ``change(passed, reply)`` alters the
    registry's response. ``lull(passed)`` returns for how many seconds a body is not read.
    With ``buffers``, a request is forwarded once it is complete. ``adds`` are headers that
    only the registry receives.
    """

    upstream: str
    pace: float | None = None
    delay: float = 0.0
    cut: Callable[[Passed], int | None] | None = None
    stall: bool = False
    hold: int | None = None
    ranges: str | int = "kept"
    lost: Callable[[Passed], int | None] | None = None
    reset: bool = False
    instead: Callable[[Passed], Reply | None] | None = None
    change: Callable[[Passed, Reply], None] | None = None
    lull: Callable[[Passed], float] | None = None
    buffers: bool = False
    adds: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    seen: list[Passed] = field(default_factory=list)
    held: int = 0  # responses delayed by ``hold``
    busiest: int = 0  # maximum of concurrent responses with blobs
    host: str = ""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = self._connections = self._blob_bytes = 0
        self._ended = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        """Listen on a free local port."""
        server = _Server(("127.0.0.1", 0), _Handler)
        server.proxy = self
        if self.tls is not None:
            server.socket = self.tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.host = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended = True
            self.release()
            server.shutdown()
            server.server_close()

    # -- counters

    def sent(self, digest: str = "/blobs/", *, since: int = 0) -> int:
        """Return the bytes sent of all blobs, or of one, from request number ``since`` on."""
        with self._changed:
            return sum(p.sent for p in self.seen[since:] if p.is_blob and digest in p.path)

    def by_connection(self) -> Counter[int]:
        """Return the bytes of bodies sent over each connection."""
        count: Counter[int] = Counter()
        with self._changed:
            for passed in self.seen:
                count[passed.connection] += passed.sent
        return count

    def asked(self, digest: str, *, since: int = 0) -> list[str | None]:
        """Return the ranges requested of a blob."""
        with self._changed:
            return [p.range for p in self.seen[since:] if p.is_blob and digest in p.path]

    def uploads(self, *methods: str, since: int = 0) -> list[Passed]:
        """Return the requests that brought bytes of blobs; ``received`` is their number."""
        wanted = methods or ("PUT", "PATCH")
        with self._changed:
            return [p for p in self.seen[since:] if p.is_upload and p.method in wanted]

    def received(self, *, since: int = 0) -> int:
        """Return the bytes of blobs received."""
        return sum(passed.received for passed in self.uploads(since=since))

    def wait_until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait until the condition holds; raise AssertionError if it does not in time."""
        with self._changed:
            assert self._changed.wait_for(condition, seconds), "it never came to pass"

    def is_holding(self) -> bool:
        return self.hold is not None and self._blob_bytes >= self.hold

    def release(self) -> None:
        """Resume all delayed responses."""
        with self._changed:
            self.hold = None
            self._changed.notify_all()

    # -- called by the server's threads

    def connected(self) -> int:
        with self._changed:
            self._connections += 1
            return self._connections

    @contextlib.contextmanager
    def answering(
        self, method: str, path: str, headers: dict[str, str], number: int
    ) -> Iterator[Passed]:
        """Record a request while it is answered."""
        with self._changed:
            span = headers.get("Range")
            passed = Passed(len(self.seen), method, path, span, number, headers=headers)
            self.seen.append(passed)
            self._under_way += passed.is_blob
            self.busiest = max(self.busiest, self._under_way)
            self._changed.notify_all()
        try:
            yield passed
        finally:
            with self._changed:
                self._under_way -= passed.is_blob

    def may_send(self, passed: Passed, count: int) -> int:
        """Return how many of ``count`` bytes to send now, and count them; 0 ends the response."""
        limit = self.cut(passed) if self.cut else None
        with self._changed:
            if limit is not None:
                count = min(count, limit - passed.sent)
                if count <= 0 and self.stall:
                    self._changed.wait_for(lambda: self._ended)
            if passed.is_blob and count > 0:
                self.held += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self.is_holding())
                self.held -= 1
                self._blob_bytes += count
            passed.sent += max(count, 0)
            self._changed.notify_all()
        return max(count, 0)

    def may_take(self, passed: Passed, left: int) -> int:
        """Return how many of ``left`` body bytes to read now; 0 ends the connection."""
        if self.lull and (seconds := self.lull(passed)):
            with self._changed:
                # A wait of infinity seconds is an OverflowError
                self._changed.wait_for(lambda: self._ended, min(seconds, threading.TIMEOUT_MAX))
        limit = self.lost(passed) if self.lost else None
        return min(left, _BLOCK, _BLOCK if limit is None else max(0, limit - passed.received))

    def took(self, passed: Passed, count: int) -> None:
        with self._changed:
            passed.received += count
            self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    proxy: Proxy
    daemon_threads = True
    request_queue_size = 64

    def server_bind(self) -> None:
        # bytes sent should equal bytes received approximately; large buffers would blur the count
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BLOCK)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _BLOCK)
        super().server_bind()

    def handle_error(self, *_: object) -> None:
        pass  # ignore clients that disconnect


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.proxy = self.server.proxy
        self.number = self.proxy.connected()
        self.registry = http.client.HTTPConnection(self.proxy.upstream, timeout=60)

    def finish(self) -> None:
        self.registry.close()
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        headers = dict(self.headers.items())
        with self.proxy.answering(self.command, self.path, headers, self.number) as passed:
            time.sleep(self.proxy.delay)
            span = passed.range
            reply = self.proxy.instead(passed) if self.proxy.instead else None
            if span and isinstance(self.proxy.ranges, int):
                reply = Reply(self.proxy.ranges)
            if reply is not None:
                self._instead(passed, reply)
                return
            headers = headers | self.proxy.adds
            if span and self.proxy.ranges == "ignored":
                del headers["Range"]
            elif span and self.proxy.ranges == "wrong":
                first, _, last = span.removeprefix("bytes=").partition("-")
                headers["Range"] = f"bytes={int(first) + 7}-{last}"
            blocks = self._body(passed, self._length())
            try:
                body = b"".join(blocks) if self.proxy.buffers or not self._length() else blocks
                self.registry.request(self.command, self.path, body, headers)
            except ConnectionAbortedError:
                self._break_off()
                self._reset()
                return
            self._pass_on(passed, self.registry.getresponse())

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _body(self, passed: Passed, length: int) -> Iterator[bytes]:
        """Return the request's body; raise ConnectionAbortedError if it is to be incomplete."""
        while passed.received < length:
            count = self.proxy.may_take(passed, length - passed.received)
            block = self.rfile.read1(count) if count else b""
            if not block:
                raise ConnectionAbortedError
            self.proxy.took(passed, len(block))
            yield block

    def _break_off(self) -> None:
        """End an incomplete request, and wait until the registry has dealt with it.

        Otherwise the client's next request may come before the registry notices the end.
        """
        if self.registry.sock is not None:
            with contextlib.suppress(OSError):
                self.registry.sock.shutdown(socket.SHUT_WR)
                while self.registry.sock.recv(_BLOCK):
                    pass

    def _reset(self) -> None:
        """Reset the connection, and the registry's with it."""
        self.close_connection = True
        self.registry.close()
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())

    def _instead(self, passed: Passed, reply: Reply) -> None:
        length = self._length()
        early = reply.after is not None and reply.after < length
        count = min(length, reply.after or 0) if early else length
        try:
            for _ in self._body(passed, count):
                pass
        except ConnectionAbortedError:
            self._reset()
            return
        headers = {"Content-Length": str(len(reply.body))} | reply.headers
        if early and not reply.abruptly:
            headers["Connection"] = "close"
        self._say(passed, reply.status, headers)
        if self.command != "HEAD":
            self.wfile.write(reply.body)
        if early and reply.abruptly:
            self._reset()
        elif early:
            self.close_connection = True
            self.wfile.flush()
            self.connection.settimeout(0.2)  # the client may have nothing more to send
            with contextlib.suppress(OSError):
                while self.rfile.read1(_BLOCK):
                    pass

    def _say(self, passed: Passed, status: int, headers: dict[str, str]) -> None:
        passed.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _pass_on(self, passed: Passed, answer: http.client.HTTPResponse) -> None:
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in _HOPS}
        reply = Reply(answer.status, headers)
        blocks = iter(lambda: answer.read(_BLOCK), b"")
        if self.proxy.change:
            reply.body = answer.read()
            self.proxy.change(passed, reply)
            body = reply.body
            blocks = iter([body[at : at + _BLOCK] for at in range(0, len(body), _BLOCK)])
        self._say(passed, reply.status, reply.headers)
        began, first = time.monotonic(), passed.sent
        for chunk in blocks:
            count = self.proxy.may_send(passed, len(chunk))
            self.wfile.write(chunk[:count])
            if count < len(chunk):
                if self.proxy.reset:
                    self._reset()
                self.close_connection = True
                self.registry.close()
                return
            if self.proxy.pace:
                due = began + (passed.sent - first) / self.proxy.pace
                time.sleep(max(0.0, due - time.monotonic()))

    def log_message(self, *_: Any) -> None:
        pass

"""A slow, leaky, forgetful proxy in front of a registry, which counts what passes."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_BLOCK = 64 * 1024
_HOPS = frozenset({"connection", "keep-alive", "transfer-encoding", "date", "server"})


@dataclass
class Passed:
    """A request that came, and how many bytes of its answer's body were sent."""

    number: int
    method: str
    path: str
    range: str | None
    connection: int
    sent: int = 0

    @property
    def is_blob(self) -> bool:
        return self.method == "GET" and "/blobs/" in self.path


@dataclass
class Proxy:
    """Every answer of ``upstream`` passes under these rules; they may be changed at any time.

    ``pace`` is a limit in bytes per second and connection, ``delay`` what a request waits before
    it is answered. ``cut(passed)`` gives the number of body bytes after which an answer breaks
    off, or None; with ``stall`` it then stands still instead. Once ``hold`` bytes of blobs have
    been sent, nothing more is until ``release()``. ``ranges`` is what becomes of requests for a
    part of a blob: "kept", "ignored", "wrong" (another part comes), or a status to refuse with.
    """

    upstream: str
    pace: float | None = None
    delay: float = 0.0
    cut: Callable[[Passed], int | None] | None = None
    stall: bool = False
    hold: int | None = None
    ranges: str | int = "kept"
    seen: list[Passed] = field(default_factory=list)
    held: int = 0  # answers that are kept waiting by ``hold``
    busiest: int = 0  # the most answers with blobs that were under way at once
    host: str = ""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = self._connections = self._blob_bytes = 0
        self._ended = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        """Listen on a free port of this machine."""
        server = _Server(("127.0.0.1", 0), _handler(self))
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

    # -- what passed

    def sent(self, digest: str = "/blobs/", *, since: int = 0) -> int:
        """The bytes sent of blobs, or of one of them, in requests from number ``since`` on."""
        with self._changed:
            return sum(p.sent for p in self.seen[since:] if p.is_blob and digest in p.path)

    def by_connection(self) -> Counter[int]:
        """The bytes of bodies sent over each connection."""
        count: Counter[int] = Counter()
        with self._changed:
            for passed in self.seen:
                count[passed.connection] += passed.sent
        return count

    def asked(self, digest: str, *, since: int = 0) -> list[str | None]:
        """The ranges that were asked for of a blob."""
        with self._changed:
            return [p.range for p in self.seen[since:] if p.is_blob and digest in p.path]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until what has passed makes it true; an AssertionError when it does not."""
        with self._changed:
            assert self._changed.wait_for(condition, seconds), "it never came to pass"

    def is_holding(self) -> bool:
        return self.hold is not None and self._blob_bytes >= self.hold

    def release(self) -> None:
        """Let everything that is held go on."""
        with self._changed:
            self.hold = None
            self._changed.notify_all()

    # -- what the server's threads call

    def connected(self) -> int:
        with self._changed:
            self._connections += 1
            return self._connections

    @contextlib.contextmanager
    def answering(self, method: str, path: str, span: str | None, number: int) -> Iterator[Passed]:
        """Note a request while it is answered."""
        with self._changed:
            passed = Passed(len(self.seen), method, path, span, number)
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
        """How many of ``count`` bytes to send now; they are counted as sent. 0 ends the answer."""
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def server_bind(self) -> None:
        # what was sent is what arrived, give or take a little: buffers would blur the count
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BLOCK)
        super().server_bind()

    def handle_error(self, *_: object) -> None:
        pass  # a client that leaves is no news here


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.number = proxy.connected()
            self.registry = http.client.HTTPConnection(proxy.upstream, timeout=60)

        def finish(self) -> None:
            self.registry.close()
            with contextlib.suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            span = self.headers.get("Range")
            with proxy.answering(self.command, self.path, span, self.number) as passed:
                time.sleep(proxy.delay)
                headers = dict(self.headers.items())
                if span and isinstance(proxy.ranges, int):
                    self.send_response(proxy.ranges)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if span and proxy.ranges == "ignored":
                    del headers["Range"]
                elif span and proxy.ranges == "wrong":
                    first, _, last = span.removeprefix("bytes=").partition("-")
                    headers["Range"] = f"bytes={int(first) + 7}-{last}"
                self.registry.request(self.command, self.path, body, headers)
                self._pass_on(passed, self.registry.getresponse())

        do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def _pass_on(self, passed: Passed, answer: http.client.HTTPResponse) -> None:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOPS:
                    self.send_header(name, value)
            self.end_headers()
            began, first = time.monotonic(), passed.sent
            while chunk := answer.read(_BLOCK):
                count = proxy.may_send(passed, len(chunk))
                self.wfile.write(chunk[:count])
                if count < len(chunk):
                    self.close_connection = True
                    self.registry.close()
                    return
                if proxy.pace:
                    due = began + (passed.sent - first) / proxy.pace
                    time.sleep(max(0.0, due - time.monotonic()))

        def log_message(self, *_: Any) -> None:
            pass

    return Handler

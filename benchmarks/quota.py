"""A registry that accepts a number of requests a second, for transfer.py; others get 429.

It keeps its content in memory, and counts the requests. A refusal has no Retry-After.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import itertools
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

# Returns True for a request that is accepted
Quota = Callable[[], bool]


def bucket(rate: float) -> Quota:
    """Accept ``rate`` requests a second, and as many at once after a pause."""
    level, filled_at = rate, time.monotonic()

    def take() -> bool:
        nonlocal level, filled_at
        now = time.monotonic()
        level, filled_at = min(rate, level + (now - filled_at) * rate), now
        is_accepted = level >= 1
        level -= is_accepted
        return is_accepted

    return take


def window(rate: float) -> Quota:
    """Accept ``rate`` requests in each second of the clock."""
    second, count = 0, 0

    def take() -> bool:
        nonlocal second, count
        if int(time.monotonic()) != second:
            second, count = int(time.monotonic()), 0
        count += 1
        return count <= rate

    return take


QUOTAS: dict[str, Callable[[float], Quota]] = {"bucket": bucket, "window": window}


class Registry(http.server.ThreadingHTTPServer):
    """The registry. ``quota`` may be replaced between two transfers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.host = f"127.0.0.1:{self.server_port}"
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.uploads = itertools.count()
        self._lock = threading.Lock()
        self.start(lambda: True)

    def start(self, quota: Quota) -> None:
        """Use another quota, and count from zero."""
        self._quota, self.accepted, self.refused = quota, 0, 0

    def admit(self) -> bool:
        """Return True if the quota allows a request."""
        with self._lock:
            is_accepted = self._quota()
            self.accepted += is_accepted
            self.refused += not is_accepted
            return is_accepted

    def forget(self) -> None:
        """Remove all content."""
        self.blobs.clear()
        self.manifests.clear()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"
    # Otherwise each answer takes 40 ms
    disable_nagle_algorithm = True
    # Status, headers and body are one packet
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.server.admit():
            self._answer(429, b'{"errors":[{"code":"TOOMANYREQUESTS"}]}')
            return
        url = urllib.parse.urlsplit(self.path)
        path, target = url.path, url.path.rpartition("/")[2]
        if "/uploads/" in path:
            self._upload(urllib.parse.parse_qs(url.query), body)
        elif self.command == "PUT":
            kind, digest = self.headers["Content-Type"], _digest(body)
            self.server.manifests[target] = self.server.manifests[digest] = kind, body
            self._answer(201, Docker_Content_Digest=digest)
        elif "/manifests/" in path and target in self.server.manifests:
            kind, manifest = self.server.manifests[target]
            self._answer(200, manifest, Content_Type=kind, Docker_Content_Digest=_digest(manifest))
        elif "/blobs/" in path and target in self.server.blobs:
            self._answer(200, self.server.blobs[target])
        else:
            self._answer(404)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _upload(self, query: dict[str, list[str]], body: bytes) -> None:
        if self.command == "POST":
            location = f"{self.path.partition('?')[0]}{next(self.server.uploads)}"
            self._answer(202, Location=location)
        else:
            self.server.blobs[query["digest"][0]] = body
            self._answer(201, Location="/")

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


@contextlib.contextmanager
def running() -> Iterator[Registry]:
    """Run a registry without a quota."""
    with Registry() as registry:
        thread = threading.Thread(target=registry.serve_forever, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            registry.shutdown()

"""A scripted registry, for responses that a correct one never sends."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from clowder_aimage.oci import Digest
from clowder_aimage.registry import retry

_BLOCK = 64 * 1024


@dataclass
class Seen:
    """A request as received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    client: tuple[str, int] = ("", 0)  # the connection of the request


@dataclass
class Answer:
    """A response to send."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None  # send only this many bytes of the body, then close
    hang: bool = False  # after ``cut`` bytes, keep the connection open and silent
    flood: int = 0  # after the body, send this many more bytes as far as they are read; then close


Script = Callable[[Seen], Answer]


class _Server(ThreadingHTTPServer):
    registry: ScriptedRegistry
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass  # ignore clients that disconnect


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer takes 40 ms

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        seen = Seen(
            self.command,
            self.path,
            dict(self.headers.items()),
            self.rfile.read(length),
            self.client_address,
        )
        self.server.registry.seen.append(seen)
        self._send(self.server.registry.script(seen))

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            self.wfile.write(answer.body[: answer.cut])
            self.wfile.flush()
            for _ in range(0, answer.flood, _BLOCK):
                self.wfile.write(bytes(_BLOCK))
                self.server.registry.flooded += _BLOCK
        if answer.hang:
            self.server.registry.released.wait(600)
        if answer.cut is not None or answer.flood:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class ScriptedRegistry:
    """Runs ``script`` for every request and records the requests."""

    def __init__(self, script: Script, address: str = "127.0.0.1") -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.released = threading.Event()
        self.flooded = 0  # bytes of floods sent
        kind = _Server6 if ":" in address else _Server
        self._server = kind((address, 0), _Handler)
        self._server.registry = self
        name = f"[{address}]" if ":" in address else address
        self.host = f"{name}:{self._server.server_address[1]}"

    def wrap(self, context: ssl.SSLContext) -> None:
        """Use TLS."""
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptedRegistry]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            self._server.shutdown()
            self._server.server_close()

    def asked(self, method: str) -> list[str]:
        """Return the paths requested with a method."""
        return [seen.path for seen in self.seen if seen.method == method]


def artifact(*blobs: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return a manifest over ``blobs`` (the first is the config), and the blobs by digest."""
    by_digest = {str(Digest.of(blob)): blob for blob in blobs}
    descriptors = [
        {
            "mediaType": "application/vnd.example.blob",
            "digest": str(Digest.of(blob)),
            "size": len(blob),
        }
        for blob in blobs
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptors[0],
        "layers": descriptors[1:],
    }
    return json.dumps(manifest).encode(), by_digest


def serving(manifest: bytes, blobs: dict[str, bytes]) -> Script:
    """Return a script that serves one artifact correctly, including Range requests."""

    def script(seen: Seen) -> Answer:
        if "/manifests/" in seen.path:
            kind = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
            return Answer(200, kind, manifest)
        blob = blobs.get(seen.path.rpartition("/")[2])
        if blob is None:
            return Answer(404)
        asked = seen.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last or len(blob) - 1)
            span = {"Content-Range": f"bytes {start}-{end}/{len(blob)}"}
            return Answer(206, span, blob[start : end + 1])
        return Answer(200, {}, blob)

    return script


def skip_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the client's retries of a request follow at once; return the seconds of the waits."""
    waits: list[float] = []
    for function in (retry.retry_call, retry.retry_write):
        defaults = function.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "sleep", waits.append)
    return waits

"""A scripted worker, for responses that a correct one never sends."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Asked:
    """A request as received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)


@dataclass
class Says:
    """The response: chunks, each sent at once. With ``is_cut`` it ends without a terminator."""

    pieces: Iterable[bytes] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False


def says(value: object, status: int = 200, **headers: str) -> Says:
    """Return a JSON response."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Says([json.dumps(value).encode()], status, named)


def line(**value: object) -> bytes:
    """Return a line of JSON, as ollama streams it."""
    return json.dumps(value).encode() + b"\n"


def event(kind: str, value: object) -> bytes:
    """Return a server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n".encode()


class ScriptedWorker:
    """Runs ``script`` for every request and records the requests.

    Except for the version, and the kind of a model: an image model, or that of ``capabilities``.
    ``left`` is set when a client disconnected before the last chunk.
    """

    def __init__(  # noqa: C901 - the handler is a closure
        self, script: Callable[[Asked], Says], path: Path | None = None, server: str = "aimage"
    ) -> None:
        self.asked: list[Asked] = []
        self.capabilities: tuple[str, ...] = ("image",)
        # Names of models that it does not have
        self.missing: set[str] = set()
        self.left = threading.Event()
        this = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = path is None

            def version_string(self) -> str:
                return server

            def do_GET(self) -> None:
                if self.path == "/api/version":
                    self._send(says({"version": "1"}))
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/api/show":
                    is_missing = json.loads(body).get("model") in this.missing
                    code = {"error": "not found", "code": "model_not_found"}
                    value = code if is_missing else {"capabilities": [*this.capabilities]}
                    self._send(says(value, 404 if is_missing else 200))
                    return
                asked = Asked(self.command, self.path, dict(self.headers.items()), body)
                this.asked.append(asked)
                self._send(script(asked))

            do_POST = do_DELETE = do_GET  # noqa: N815

            def _send(self, answer: Says) -> None:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                is_chunked = "Content-Length" not in answer.headers
                if is_chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for piece in filter(None, answer.pieces):
                        head = b"%x\r\n" % len(piece)
                        self.wfile.write(head + piece + b"\r\n" if is_chunked else piece)
                        self.wfile.flush()
                    if is_chunked and not answer.is_cut:
                        self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    this.left.set()
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self._server: ThreadingHTTPServer | socketserver.ThreadingUnixStreamServer
        if path is None:
            tcp = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            self._server, self.host = tcp, f"127.0.0.1:{tcp.server_address[1]}"
        else:
            self._server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
            self.host = f"unix://{path}"
        self._server.daemon_threads = True

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptedWorker]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

"""A registry whose repositories are attacks: ``/v2/SCENARIO/...`` answers as SCENARIO does.

The scenarios of TIME never end, those of FORM break HTTP or the specification. The rest of a
repository is a small artifact.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from clowder_aimage.oci import Digest, mediatype

CONFIG, LAYER = b"{}", b"the layer of a hostile registry"
GAP = 0.01  # seconds between the bytes of a drip
_PATH = re.compile(r"/v2/(.+)/(manifests|blobs|tags|referrers)/([^?]+)")
_ESCAPES = "\x1b[31m\x9b2J\u202eevil"


def descriptor(blob: bytes, **fields: Any) -> dict[str, Any]:
    kind = "application/octet-stream"
    return {"mediaType": kind, "digest": str(Digest.of(blob)), "size": len(blob), **fields}


def manifest(*layers: dict[str, Any]) -> bytes:
    config = {**descriptor(CONFIG), "mediaType": "application/vnd.oci.empty.v1+json"}
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST, "config": config}
    return json.dumps({**document, "layers": list(layers) or [descriptor(LAYER)]}).encode()


_MANIFEST = manifest()
_SIZE = 1 << 20  # of the layer of a scenario of BLOB_TIME
BLOBS = {str(Digest.of(blob)): blob for blob in (CONFIG, LAYER)}
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: " + mediatype.OCI_MANIFEST.encode() + b"\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
_WHOLE = _CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(_MANIFEST), _MANIFEST)
Endless = tuple[bytes, bytes, float]  # sent first, then repeated, after so many seconds


def _plain(status: bytes, body: bytes, *headers: bytes) -> bytes:
    fields = (b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers)
    return b"\r\n".join(fields) + b"\r\n\r\n" + body


def _of(body: bytes, *headers: bytes) -> bytes:
    return _plain(b"200 OK", body, b"Content-Type: " + mediatype.OCI_MANIFEST.encode(), *headers)


def _error(status: bytes) -> bytes:
    error = {"code": _ESCAPES, "message": f"{_ESCAPES}\nsecond line", "detail": _ESCAPES}
    return _plain(status, json.dumps({"errors": [error]}).encode())


# answers to a request for a manifest that never end
TIME: dict[str, Endless] = {
    "dripstatus": (b"", b"H", GAP),
    "driphead": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a", GAP),
    "contslow": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", GAP),
    "cont": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.0),
    "dripbody": (_OK + b"Content-Length: 4000000\r\n\r\n", b" ", GAP),
    "dripclose": (_OK + b"Connection: close\r\n\r\n", b" ", GAP),
    "chunkext": (_CHUNKED, b"1;" + b"a" * 60_000 + b"\r\n \r\n", GAP),
    "trailerslow": (_WHOLE, b"X-T: a\r\n", GAP),
    "trailer": (_WHOLE, b"X-T: aaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 1000, 0.0),
    "driperror": (b"HTTP/1.1 500 X\r\nContent-Length: 60000\r\n\r\n", b" ", GAP),
}
# the same in answer to a request for a blob, whose head is right
BLOB_TIME: dict[str, Endless] = {
    "blobdrip": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % _SIZE, b" ", GAP),
    "blobchunkext": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"1;" + b"a" * 60_000 + b"\r\n \r\n",
        GAP,
    ),
}
# complete answers to a request for a manifest; the connection is closed after them
FORM: dict[str, bytes] = {
    "lengths": _of(_MANIFEST, b"Content-Length: 5"),
    "tecl": _of(_MANIFEST, b"Transfer-Encoding: chunked"),
    "neglen": _OK + b"Content-Length: -5\r\n\r\n" + _MANIFEST,
    "biglen": _OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + _MANIFEST,
    "garbage": b"\x00\xff\xfe garbage\r\n\r\n" * 100,
    "headers": _OK + b"A: b\r\n" * 1000,
    "digestheader": _of(_MANIFEST, b"Docker-Content-Digest: sha256:\x1b[31m" + b"a" * 60),
    "ctype": _plain(b"200 OK", _MANIFEST, b"Content-Type: text/\x1b[31mhtml; x=\x9b"),
    "error4": _error(b"400 Bad"),
    "error5": _error(b"500 Bad"),
    "sizes": _of(manifest(descriptor(LAYER), descriptor(LAYER, size=5))),
    "zero": _of(manifest(descriptor(LAYER, size=0))),
    "negative": _of(manifest(descriptor(LAYER, size=-1))),
    "big": _of(manifest(descriptor(LAYER, size=1 << 49))),
    "huge": _of(manifest(descriptor(LAYER, size=1 << 63))),
    "float": _of(manifest(descriptor(LAYER, size=float(len(LAYER))))),
    "challenge": _plain(
        b"401 X",
        b"",
        b'WWW-Authenticate: Bearer realm="http://127.0.0.1:1/",service="' + b"s" * 60_000 + b'"',
    ),
}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.registry.asked.append(self.path)
        found = _PATH.match(self.path)
        with contextlib.suppress(OSError):
            if found is None:
                self._send(_plain(b"200 OK", b"{}"))
            else:
                self._route(*found.groups())

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _route(self, scenario: str, kind: str, target: str) -> None:
        is_slow = kind in ("manifests", "tags") and scenario in TIME
        if scenario == "token":
            self._endless((b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n", b" ", GAP))
        elif scenario == "dripauth":
            realm = f'Bearer realm="http://{self.server.registry.host}/v2/token/tags/x"'
            self._send(_plain(b"401 X", b"{}", b"WWW-Authenticate: " + realm.encode()))
        elif scenario == "loop" and kind == "manifests":
            again = f"Location: /v2/loop/manifests/x?n={len(self.server.registry.asked)}"
            self._send(_plain(b"302 Found", b"", again.encode()))
        elif is_slow:
            self._endless(TIME[scenario])
        elif kind == "manifests" and scenario in FORM:
            self._send(FORM[scenario], is_last=True)
        elif kind == "manifests":
            large = manifest(descriptor(LAYER, size=_SIZE))
            self._send(_of(large if scenario in BLOB_TIME else _MANIFEST))
        elif kind == "blobs" and scenario in BLOB_TIME and target == str(Digest.of(LAYER)):
            self._endless(BLOB_TIME[scenario])
        elif kind == "blobs" and target in BLOBS:
            self._send(_plain(b"200 OK", BLOBS[target]))
        else:
            self._send(_plain(b"404 Not Found", b"{}"))

    def _send(self, answer: bytes, *, is_last: bool = False) -> None:
        head, end, body = answer.partition(b"\r\n\r\n")
        self.wfile.write(head + end + (b"" if self.command == "HEAD" else body))
        self.close_connection = self.close_connection or is_last

    def _endless(self, answer: Endless) -> None:
        first, again, gap = answer
        self.wfile.write(first)
        while not self.server.registry.released.wait(gap):
            self.wfile.write(again)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    registry: HostileRegistry
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        pass  # clients disconnect


class HostileRegistry:
    """The server at ``host``; ``asked`` has the paths of its requests."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.asked: list[str] = []
        self.released = threading.Event()
        self._server = _Server((address, 0), _Handler)
        self._server.registry = self
        self.host = f"{address}:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[HostileRegistry]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            self._server.shutdown()
            self._server.server_close()

"""A client of a worker that was started as deploy/ describes."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n"
TIMEOUT = 120.0


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Client:
    """``place`` is ``http://HOST:PORT`` or ``unix://PATH``."""

    place: str
    token: str | None = None

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of a response."""
        kind, _, rest = self.place.partition("://")
        connection = (
            _Unix(rest) if kind == "unix" else http.client.HTTPConnection(rest, timeout=TIMEOUT)
        )
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(said) if said[:1] in (b"{", b"[") else said

    def picture(self, **wishes: object) -> bytes:
        """Return an image by OpenAI's API."""
        body = {"prompt": "a red circle", "response_format": "b64_json", **wishes}
        status, answer = self.ask("POST", "/v1/images/generations", body)
        assert status == 200, answer
        return base64.b64decode(answer["data"][0]["b64_json"])

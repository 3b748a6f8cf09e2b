"""The registry in a container, with a stand-in for the Docker engine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from testcontainers.core.config import ConnectionMode, testcontainers_config

from tests import real_registry

ID = "0123456789abcdef"
LOG = b'127.0.0.1 - - [27/Nov/2026] "GET /v2/team/model/manifests/v1 HTTP/1.1" 200 2 "" "x"\n'


class StandInEngine(ThreadingHTTPServer):
    """The calls of the engine's API for one container; its port is that of this server."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[str] = []
        self.created: dict[str, Any] = {}
        self.credentials = b""


class _Handler(BaseHTTPRequestHandler):
    server: StandInEngine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *words: object) -> None:  # noqa: A002
        """Print nothing."""

    def _serve(self) -> None:
        body = self._body()
        path = re.sub(r"^/v1\.\d+|\?.*", "", self.path)
        call = f"{self.command} {path}"
        self.server.calls.append(call)
        if call == "POST /containers/create":
            self.server.created = json.loads(body)
        if call == f"PUT /containers/{ID}/archive":
            self.server.credentials = body
        status, answer = self._answers().get(call, (404, {"message": call}))
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answers(self) -> dict[str, tuple[int, Any]]:
        ports = {"5000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(self.server.server_port)}]}
        container = {
            "Id": ID,
            "State": {"Status": "running", "Running": True},
            "Config": {"Tty": False},
            "NetworkSettings": {"Ports": ports, "Networks": {}},
        }
        frame = b"\x01\0\0\0" + len(LOG).to_bytes(4, "big") + LOG
        here = f"/containers/{ID}"
        return {
            "GET /version": (200, {"ApiVersion": "1.44"}),
            "GET /_ping": (200, b"OK"),
            f"GET /images/{real_registry.IMAGE}/json": (200, {"Id": "sha256:0"}),
            "POST /containers/create": (201, {"Id": ID, "Warnings": []}),
            f"POST {here}/start": (204, b""),
            "GET /containers/json": (200, [container]),
            f"GET {here}/json": (200, container),
            f"GET {here}/logs": (200, frame),
            f"PUT {here}/archive": (200, b""),
            f"DELETE {here}": (204, b""),
            "GET /v2": (200, {}),  # the registry
        }


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInEngine]:
    with StandInEngine() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)
        mode = ConnectionMode.docker_host
        monkeypatch.setattr(testcontainers_config, "connection_mode_override", mode)
        real_registry._engine_answers.cache_clear()
        try:
            yield server
        finally:
            real_registry._engine_answers.cache_clear()
            server.shutdown()
            thread.join()


def test_the_class_of_containers_can_be_imported() -> None:
    assert real_registry.container_type().__name__ == "DockerRegistryContainer"


@pytest.mark.parametrize("private", [False, True], ids=["public", "private"])
def test_a_container_is_used_where_an_engine_answers(
    engine: StandInEngine, tmp_path: Path, private: bool
) -> None:
    with real_registry.find_registry(tmp_path, private=private) as registry:
        assert registry.host.endswith(f":{engine.server_port}")
        assert registry.mark() == len(LOG)
        assert registry.count(0, "host/team/model") == {"GET manifest": 1}
        assert f"DELETE /containers/{ID}" not in engine.calls
    assert f"DELETE /containers/{ID}" in engine.calls
    assert engine.created["Image"] == real_registry.IMAGE
    assert (real_registry.USER.encode() in engine.credentials) is private


def test_a_required_registry_that_is_not_there_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AIMAGE_REQUIRE_TOOLS", "1")
    real_registry._engine_answers.cache_clear()
    try:
        with (
            pytest.raises(pytest.fail.Exception, match="no registry"),
            real_registry.find_registry(tmp_path),
        ):
            pass
    finally:
        real_registry._engine_answers.cache_clear()

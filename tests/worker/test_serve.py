"""The worker daemon: sockets, shutdown, logs and systemd."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.worker.conftest import LocalWorker, Worker

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("structlog", reason="structlog is not installed")


from clowder_aimage.api.worker_role import drain
from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.engine.engine import Engine
from clowder_aimage.errors import AccessError, UsageError
from clowder_aimage.http import listening_socket, systemd
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.log import CONSOLE, JSON, configure, redact
from clowder_aimage.http.server import Signals
from tests.conftest import TINY
from tests.process import PROGRAM, spawn
from tests.scripted import Answer, ScriptedRegistry
from tests.wait import until
from tests.worker.conftest import answer_to

SECRET = "a lighthouse that nobody may know of"
LONG = {"model": "tiny", "prompt": SECRET, "size": "256x256", "steps": 150, "stream": True}


def post(
    worker: Worker | LocalWorker, path: str, body: dict[Any, Any] | str, **headers: str
) -> tuple[HTTPConnection, HTTPResponse]:
    """Send a request; return the connection and the response with its body unread."""
    line = http.client.HTTPConnection(worker.host, timeout=60)
    line.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | headers)
    return line, line.getresponse()


def begun(worker: Worker, **more: Any) -> tuple[HTTPConnection, HTTPResponse]:
    """Start a long request and wait for its first event."""
    line, answer = post(worker, "/v1/images/generations", LONG | more)
    assert answer.status == 200, answer.read()
    read_until(answer, b"progress")
    return line, answer


def read_until(answer: HTTPResponse, word: bytes) -> bytes:
    found = b""
    while word not in found:
        data = answer.readline()
        assert data, f"the stream ended: {found!r}"
        found += data
    return found


def status_of(worker: Worker | LocalWorker, path: str = "/readyz") -> tuple[int, bytes]:
    line = http.client.HTTPConnection(worker.host, timeout=30)
    try:
        line.request("GET", path)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


# -- listening


def test_the_url_is_printed_when_the_worker_is_ready_and_sigint_ends_it(
    worker: LocalWorker,
) -> None:
    process = worker.aimage.start("serve", "--addr", "localhost:0")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        host, _, port = url.removeprefix("http://").partition(":")
        assert (host, url[:7]) == ("127.0.0.1", "http://")
        line = http.client.HTTPConnection(host, int(port), timeout=30)
        line.request("GET", "/healthz")
        assert line.getresponse().status == 200
        line.close()
    finally:
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), errors
    assert "draining" in errors and "stopped" in errors and "Traceback" not in errors


def test_an_address_in_use_is_reported(worker: LocalWorker) -> None:
    done = worker.aimage("serve", "--addr", worker.host, code=1)
    assert f"cannot listen on {worker.host}: Address already in use" in done.err
    assert "aimage answers there" in done.err and "--addr" in done.err


def test_the_default_port_in_use_is_said_to_be_that_of_workers_and_gateways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ScriptedRegistry(lambda _: Answer(404))
    monkeypatch.setattr(listening_socket, "detect_program", lambda _: "aimage")
    with server.running() as other:
        address = Endpoint.parse_listen(other.host)
        monkeypatch.setattr(listening_socket, "DEFAULT_HOST", other.host)
        with pytest.raises(AccessError, match="workers and gateways have the same default port"):
            listening_socket.listen_tcp(address)


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (Answer(200, {}, b"Ollama is running"), "ollama"),
        (Answer(403, {"Server": "AirTunes/845.5.1"}), "the AirPlay receiver of macOS"),
    ],
)
def test_an_address_in_use_names_the_program_that_answers(answer: Answer, name: str) -> None:
    refused = pytest.raises(AccessError, match=f"Address already in use; {name} answers there")
    with ScriptedRegistry(lambda _: answer).running() as other, refused:
        listen(other.host, has_tokens=False)


@pytest.mark.integration
def test_the_metrics_have_an_address_of_their_own_without_a_token(
    worker: LocalWorker, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("admin " + "a" * 16)
    options = ("--metrics-addr", "127.0.0.1:0", "--log-format", "json")
    other = worker.launch("--token-file", tmp_path / "tokens", *options)
    until(lambda: any('"apart"' in line for line in other.lines))
    (url,) = next(json.loads(line)["apart"] for line in other.lines if '"apart"' in line)
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        assert b"aimage_build_info" in answer.read()
    assert answer_to(urllib.request.Request(f"{other.url}/v1/models"))[0] == 401


def test_an_address_of_the_metrics_that_is_in_use_is_reported(worker: LocalWorker) -> None:
    done = worker.aimage("serve", "--addr", "127.0.0.1:0", "--metrics-addr", worker.host, code=1)
    assert f"cannot listen on {worker.host}" in done.err and "--addr" not in done.err
    done = worker.aimage("serve", "--addr", "127.0.0.1:0", "--metrics-addr", "nine", code=2)
    assert "invalid address 'nine'" in done.err


def test_a_worker_listens_on_tcp_and_a_unix_socket(
    worker: LocalWorker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "run" / "s"
    other = worker.start("--addr", "127.0.0.1:0", "--socket", path)
    assert [url.partition(":")[0] for url in other.urls] == ["unix", "http"]
    other.url = other.urls[1]
    assert other.get("/healthz") == {"status": "ok"}
    other.end()
    assert not path.exists()


# -- draining


@pytest.mark.integration
def test_draining_finishes_running_requests_and_refuses_new_ones(worker: LocalWorker) -> None:
    """Those that are queued get an error."""
    other = worker.launch()
    line, answer = begun(other)
    waiting, queued = post(other, "/v1/images/generations", LONG)
    with contextlib.closing(line), contextlib.closing(waiting):
        other.process.terminate()
        until(lambda: status_of(other)[0] == 503)
        assert b"draining" in status_of(other)[1]
        assert status_of(other, "/healthz")[0] == 200
        refused, said = post(other, "/v1/images/generations", LONG | {"stream": False})
        with contextlib.closing(refused):
            assert said.status == 503
            assert int(said.headers["Retry-After"]) >= 1
            assert json.loads(said.read())["error"]["code"] == "unavailable"
        assert b"event: done" in answer.read()
        events = queued.read()
        assert b"event: error" in events and b"shutting down" in events
        assert b"event: done" not in events
    code, errors = other.wait()
    assert code == 0 and "Traceback" not in errors


@pytest.mark.integration
def test_a_second_signal_ends_draining(worker: LocalWorker) -> None:
    other = worker.launch("--grace", "1h")
    line, answer = begun(other, n=10)
    with contextlib.closing(line):
        other.process.terminate()
        until(lambda: status_of(other)[0] == 503)
        other.process.terminate()
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            assert b"event: done" not in answer.read()
    code, errors = other.wait()
    assert code == 0 and "Traceback" not in errors


@pytest.mark.integration
def test_requests_are_stopped_after_the_grace_period(worker: LocalWorker) -> None:
    other = worker.launch("--grace", "0")
    line, answer = begun(other, n=10)
    with contextlib.closing(line):
        other.process.terminate()
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            assert b"event: done" not in answer.read()
    assert other.wait()[0] == 0


class ClosedEngine(Engine):
    """An engine that records the grace periods passed to ``close``."""

    def __init__(self, is_busy: bool) -> None:
        self.is_busy = is_busy
        self.closed: list[float] = []

    async def close(self, grace: float) -> None:
        self.closed.append(grace)
        if self.is_busy and grace:
            await asyncio.Event().wait()


def test_a_second_signal_closes_the_engine_without_grace() -> None:
    async def run(is_busy: bool) -> list[float]:
        engine, signals = ClosedEngine(is_busy), Signals()
        signals.receive()
        assert (signals.first.is_set(), signals.second.is_set()) == (True, False)
        if is_busy:
            asyncio.get_running_loop().call_soon(signals.receive)
        async with asyncio.timeout(30):
            await drain(engine, 3600.0, signals.second)
        return engine.closed

    assert asyncio.run(run(False)) == [3600.0]
    assert asyncio.run(run(True)) == [3600.0, 0]


def test_an_event_stream_does_not_delay_shutdown(worker: LocalWorker) -> None:
    other = worker.start()
    line = http.client.HTTPConnection(other.host, timeout=60)
    with contextlib.closing(line):
        line.request("GET", "/v1/events")
        answer = line.getresponse()
        assert answer.readline() == b"retry: 2000\n"
        read_until(answer, b"event: ready")
        other.drain()
        read_until(answer, b"event: drain")
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            answer.read()


# -- wanted models


def test_a_worker_is_ready_when_wanted_models_are_present(worker: LocalWorker) -> None:
    other = worker.start("--wanted", "tiny", "--wanted", "absent")
    status, body = status_of(other)
    assert status == 503
    assert json.loads(body)["reasons"] == [{"reason": "model missing", "model": "absent"}]
    worker.aimage("tag", "tiny", "absent")
    assert status_of(other)[0] == 200
    worker.aimage("rm", "absent")


@pytest.mark.integration
def test_wanted_models_are_pulled(worker: LocalWorker, repository: str) -> None:
    first = worker.aimage.home / "first"
    worker.aimage("create", "-q", repository, TINY, "--whole-files", "--store", first)
    worker.aimage("push", "-q", repository, "--store", first)
    other = worker.start("--wanted", repository)
    until(lambda: status_of(other)[0] == 200)
    assert repository in worker.aimage("ls").out


# -- logs


def test_each_request_is_logged_as_json_without_its_content(worker: LocalWorker) -> None:
    other = worker.launch("--log-format", "json", "--log-level", "debug")
    headers = {"Authorization": "Bearer sk-secret", "X-Request-Id": "mine-1"}
    asked = {"model": "tiny", "prompt": SECRET, "user": "operator-7", "size": "32x32", "steps": 1}
    line, answer = post(other, "/v1/images/generations", asked, **headers)
    assert (answer.status, answer.headers["X-Request-Id"]) == (200, "mine-1")
    answer.read()
    line.close()
    line, answer = post(other, "/v1/images/generations", asked | {"size": SECRET, "n": SECRET})
    assert answer.status == 400
    line.close()
    broken = f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: {SECRET}\0\r\n\r\n"
    host, port = other.host.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(broken.encode())
        assert b" 400 " in raw.makefile("rb").readline()
    line, answer = post(other, f"/v1/nothing/{'x' * 300}?token=sk-secret", SECRET)
    assert answer.status == 404
    last_id = answer.headers["X-Request-Id"]
    line.close()
    _, errors = other.stop()
    for word in ("lighthouse", "operator-7", "sk-secret", "mine-1", "nothing", "xxx"):
        assert word not in errors, errors
    lines = [json.loads(text) for text in errors.splitlines() if text.strip()]
    requests = [one for one in lines if one["event"] == "request"]
    assert [(one["route"], one["status"]) for one in requests] == [
        ("/v1/images/generations", 200),
        ("/v1/images/generations", 400),
        ("unknown", 404),
    ]
    last = requests[-1]
    assert (last["method"], last["id"], last.get("path")) == ("POST", last_id, None)
    assert {"loading", "load", "generating"} <= {one["event"] for one in lines}
    first = requests[0]
    assert (first["model"], first["level"]) == ("tiny:latest", "info")
    assert re.fullmatch("[0-9a-f]{16}", first["id"])
    assert first["seconds"] > 0 and first["timestamp"]


def test_an_invalid_request_id_is_replaced(worker: LocalWorker) -> None:
    line, answer = post(worker, "/nothing", {}, **{"X-Request-Id": "a b; c"})
    line.close()
    assert answer.headers["X-Request-Id"] != "a b; c"


def test_redact_masks_prompts_and_users() -> None:
    event = redact(None, "", {"event": "x", "Prompt": SECRET, "user": "me", "model": "tiny"})
    assert event == {"event": "x", "Prompt": "***", "user": "***", "model": "tiny"}


@pytest.mark.parametrize("kind", (CONSOLE, JSON))
def test_logged_tracebacks_contain_no_variables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    file = io.StringIO()
    configure(kind, file=file)
    prompt = SECRET
    try:
        raise ValueError(f"of {len(prompt)} characters")
    except ValueError:
        logging.getLogger("some.library").exception("it failed")
        logging.getLogger("ours").warning("it is said", extra={"prompt": prompt})
    lines = file.getvalue()
    assert "ValueError" in lines and "it failed" in lines and "it is said" in lines
    assert SECRET not in lines


# -- systemd


@pytest.mark.integration
def test_a_quiet_worker_notifies_systemd_and_writes_nothing(
    worker: LocalWorker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("n") / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(path))
        heard.settimeout(30)
        other = worker.launch("-q", NOTIFY_SOCKET=str(path), WATCHDOG_USEC="20000000")
        first = {heard.recv(100), heard.recv(100)}
        assert first == {b"READY=1", b"WATCHDOG=1"}
        assert other.stop() == (0, "")
        assert heard.recv(100) == b"STOPPING=1"


def test_notify_ignores_a_missing_or_invalid_socket() -> None:
    systemd.notify("READY=1", {})
    systemd.notify("READY=1", {"NOTIFY_SOCKET": "/nowhere/at/all"})
    systemd.notify("READY=1", {"NOTIFY_SOCKET": "relative"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        if sys.platform == "linux":
            heard.bind("\0" + (name := f"aimage-{os.getpid()}"))
            systemd.notify("READY=1", {"NOTIFY_SOCKET": f"@{name}"})
            assert heard.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    ("environment", "period"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_period_is_half_of_its_timeout(
    environment: dict[str, str], period: float | None
) -> None:
    assert systemd.read_watchdog_interval(environment) == period


def activated(
    worker: LocalWorker, listening: socket.socket, *arguments: Any
) -> subprocess.Popen[Any]:
    """Start a worker by socket activation, with the socket as descriptor 3."""
    command = shlex.join([*PROGRAM, "serve", "--json", *arguments])
    number = listening.fileno()
    script = f"exec 3<&{number}; export LISTEN_PID=$$ LISTEN_FDS=1; exec {command}"
    return spawn(
        ["bash", "-c", script],
        pass_fds=[number],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=worker.aimage.env(),
    )


@pytest.mark.integration
def test_a_socket_passed_by_systemd_is_served(worker: LocalWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = activated(worker, listening)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["urls"] == [url]
        line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        line.request("GET", "/healthz")
        assert line.getresponse().status == 200
        line.close()
        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_a_passed_non_loopback_socket_requires_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("", 0))
    monkeypatch.setattr(systemd, "open_passed_sockets", lambda: [listening])
    with pytest.raises(UsageError, match="without tokens"):
        listen(None, has_tokens=False)
    assert listening.fileno() < 0  # it was closed

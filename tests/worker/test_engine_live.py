"""A live worker whose process, models or registries end, hang or are late."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import pytest

from tests.real_registry import RealRegistry

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")
pytest.importorskip("structlog")

from clowder_aimage.engine import frame
from clowder_aimage.errors import UsageError
from clowder_aimage.http import systemd
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.process import PROGRAM, run, spawn
from tests.proxy import Proxy, Reply
from tests.wait import until

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker, Worker


LONG = {"model": "tiny", "prompt": "a dog", "size": "256x256", "steps": 150, "stream": True}

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def post(worker: Worker, path: str, body: dict[str, Any]) -> HTTPConnection:
    line = http.client.HTTPConnection(worker.host, timeout=60)
    line.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return line


def begun(worker: Worker) -> tuple[HTTPConnection, HTTPResponse, int]:
    """Start a long request; return its connection, its response and the process id of its model."""
    line = post(worker, "/v1/images/generations", LONG)
    answer = line.getresponse()
    while b"progress" not in answer.readline():
        pass
    tasks = Path(f"/proc/{worker.process.pid}/task").glob("*/children")
    (pid,) = [int(word) for file in tasks for word in file.read_text().split()]
    return line, answer, pid


def status(worker: Worker, path: str = "/healthz") -> int:
    line = http.client.HTTPConnection(worker.host, timeout=30)
    with closing(line):
        line.request("GET", path)
        return line.getresponse().status


# -- shutdown


@pytest.mark.integration
def test_requests_that_wait_for_a_download_get_503_at_shutdown(worker: LocalWorker) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/images/generations", {"prompt": "a dog"}),
        ("/v1/images/generations", {"prompt": "a dog", "stream": True}),
        ("/api/generate", {"prompt": "a dog"}),
        ("/api/pull", {"stream": False}),
    ]
    other = worker.launch()
    with contextlib.ExitStack() as stack:
        lines = []
        for path, body in requests:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            name = f"127.0.0.1:{silent.getsockname()[1]}/team/x:v1"
            lines.append(stack.enter_context(closing(post(other, path, body | {"model": name}))))
            accepted, _ = silent.accept()  # the worker has connected
            stack.enter_context(accepted)
        other.process.terminate()
        answers = [line.getresponse() for line in lines]
        bodies = [answer.read() for answer in answers]
    for answer, text in (answers[0], bodies[0]), (answers[3], bodies[3]):
        assert answer.status == 503, text
        assert int(answer.headers["Retry-After"]) >= 1
    assert b"event: error" in bodies[1] and b"unavailable" in bodies[1]
    assert json.loads(bodies[2].splitlines()[-1])["status"] == 503
    code, errors = other.wait()
    assert code == 0 and "Traceback" not in errors


@pytest.mark.integration
@needs_proc
def test_a_forced_shutdown_is_reported_as_a_shutdown(worker: LocalWorker) -> None:
    other = worker.launch("--grace", "1h")
    line, answer, pid = begun(other)
    with closing(line):
        os.kill(pid, signal.SIGSTOP)
        other.process.terminate()
        until(lambda: status(other, "/readyz") == 503)
        other.process.terminate()
        said = answer.read()
    assert b"event: error" in said and b"shutting down" in said
    assert b"internal_error" not in said
    assert other.wait()[0] == 0
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.integration
def test_sighup_does_not_end_the_worker(worker: LocalWorker) -> None:
    other = worker.launch()
    other.process.send_signal(signal.SIGHUP)
    until(lambda: any("reload ignored" in line for line in other.lines))
    assert status(other) == 200
    assert other.stop()[0] == 0


# -- the model's process


@pytest.mark.integration
def test_a_model_process_exits_silently_after_its_worker(worker: LocalWorker) -> None:
    process = spawn(
        [sys.executable, "-m", "clowder_aimage.engine.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=worker.aimage.env(),
    )
    manifest = ImageLayout(worker.store).resolve(Reference.parse("tiny")).to_json()
    place = {"roots": [str(worker.store)], "reference": "tiny", "manifest": manifest}
    limits = {"dtype": None, "text_encoder": "auto", "memory": None, "reserved": 0, "mark": True}
    source, target, errors = process.stdout, process.stdin, process.stderr
    assert source is not None and target is not None and errors is not None
    target.write(frame.encode({"do": "load", **place, **limits}))
    target.flush()
    while (found := frame.read(cast(BinaryIO, source))) is not None and found[0]["is"] == "loading":
        pass
    assert found is not None and found[0]["is"] == "loaded"
    source.close()
    request = {"prompt": "a dog", "width": 32, "height": 32, "steps": 3, "seed": 1}
    command = {"do": "generate", "id": 1, **place, "encoding": {}, "request": request}
    target.write(frame.encode(command))
    target.flush()
    with errors:
        assert errors.read() == b""
    assert process.wait(30) == 0
    target.close()


@pytest.mark.integration
@needs_proc
def test_stderr_of_a_model_process_is_logged_by_the_worker(worker: LocalWorker) -> None:
    other = worker.launch("--log-format", "json", PYTHONFAULTHANDLER="1")
    line, answer, pid = begun(other)
    with closing(line):
        os.kill(pid, signal.SIGABRT)
        assert b"event: error" in answer.read()
    _, errors = other.stop()
    lines = [json.loads(text) for text in errors.splitlines() if text.strip()]
    said = [one["event"] for one in lines if "Fatal Python error" in one["event"]]
    assert said and str(pid) in said[0]


# -- wanted models


@pytest.mark.integration
def test_a_failing_wanted_model_is_retried_and_does_not_block_others(
    worker: LocalWorker, registry: RealRegistry, repository: str
) -> None:
    first = worker.aimage.home / "first"
    worker.aimage("create", "-q", repository, TINY, "--whole-files", "--store", first)
    worker.aimage("push", "-q", repository, "--store", first)
    with Proxy(registry.host).running() as proxy:
        proxy.instead = lambda passed: Reply(418)  # this status is not retried
        late = repository.replace(registry.host, proxy.host)
        other = worker.launch("--wanted", late, "--wanted", repository)
        until(lambda: any("preload failed" in line for line in other.lines))
        until(lambda: repository in worker.aimage("ls").out)
        assert status(other, "/readyz") == 503
        proxy.instead = None
        until(lambda: status(other, "/readyz") == 200)
        assert other.stop()[0] == 0


# -- systemd sockets


@pytest.mark.integration
def test_a_passed_descriptor_that_is_not_a_socket_is_refused(worker: LocalWorker) -> None:
    command = shlex.join([*PROGRAM, "serve"])
    script = f"exec 3</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec {command}"
    done = run(["bash", "-c", script], text=True, env=worker.aimage.env(), timeout=60)
    assert done.returncode == 2
    assert "descriptor 3 is not a listening socket" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_passed_descriptor_that_is_closed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = os.dup(0)
    os.close(closed)
    monkeypatch.setattr(systemd, "FIRST", closed)
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    with pytest.raises(UsageError, match=f"descriptor {closed} is not a listening socket"):
        systemd.open_passed_sockets(environment)


def test_a_passed_socket_that_does_not_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as mute:
        monkeypatch.setattr(systemd, "FIRST", os.dup(mute.fileno()))
        environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
        with pytest.raises(UsageError, match="it is not listening"):
            systemd.open_passed_sockets(environment)

"""Listening addresses, the command line, and the shutdown of a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from clowder_aimage.distribution.role import serve
from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.engine.worker_client import WorkerClient
from clowder_aimage.errors import AccessError, UsageError
from clowder_aimage.layout import ImageLayout
from tests.distribution.served import REPOSITORY_ROOT, Server, digest_of
from tests.process import Aimage, run


def never(url: str) -> None:
    raise AssertionError(f"it listens on {url}")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "my.host:0"])
def test_other_addresses_require_a_flag(tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="without authentication") as caught:
        serve(ImageLayout(tmp_path), address, on_ready=never)
    assert caught.value.remedy == "listen_without_tokens"


@pytest.mark.parametrize("address", ["5000", ":5000", "a:65536"])
def test_serve_refuses_an_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="invalid address"):
        serve(ImageLayout(tmp_path), address, on_ready=never)


def test_addresses_are_parsed() -> None:
    assert Endpoint.parse_listen("localhost:5000") == Endpoint("http", "127.0.0.1", 5000)
    assert Endpoint.parse_listen("[::1]:0") == Endpoint("http", "::1", 0)
    assert Endpoint.parse_listen("127.8.8.8:1").is_loopback
    assert Endpoint.parse_listen("[::1]:1").is_loopback
    assert not Endpoint.parse_listen("localhost.example:1").is_loopback


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        # It does not listen: the program that has the port is not waited for
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(AccessError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(ImageLayout(tmp_path), f"127.0.0.1:{port}", on_ready=never)


def test_ipv6_is_served(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    server = serve_layout(tmp_path, address="[::1]:0")
    assert server.url.startswith("http://[::1]:")
    assert server.ask("GET", "/v2/").status_code == 200


def test_remote_address_is_served_with_the_flag(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    server = serve_layout(tmp_path, "remote", address="0.0.0.0:0")
    server.url = f"http://127.0.0.1:{server.address[1]}"
    answer = server.ask("GET", "/v2/", headers={"Host": "registry.example"})
    assert answer.status_code == 200


def test_missing_store_is_not_created_by_reads(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    server = serve_layout(tmp_path / "store")
    assert server.ask("GET", "/v2/_catalog").json() == {"repositories": []}
    assert server.ask("GET", f"/v2/a/blobs/{digest_of(b'')}").status_code == 404
    assert not (tmp_path / "store").exists()


def test_store_that_is_a_file_fails(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
    (tmp_path / "file").write_text("not a store")
    server = serve_layout(tmp_path / "file")
    answer = server.ask("PATCH", server.begin(), data=b"first bytes")
    assert answer.status_code == 503
    assert "not a directory" not in answer.text  # local paths are only in the log
    assert "is not a directory" in server.stop()[1]


def test_command_line_refuses_remote_addresses(aimage: Callable[..., Aimage]) -> None:
    done = aimage("a")("registry", "serve", "--addr", "0.0.0.0:0", code=2)
    assert done.out == ""
    assert "--allow-remote" in done.err
    assert "--token-file" in done.err


@pytest.mark.integration
def test_command_line_of_a_cache_serves_until_interrupted(
    tmp_path: Path, server: Server, aimage: Callable[..., Aimage]
) -> None:
    raw = server.push("t", b"x")
    host = server.url.removeprefix("http://")
    (tmp_path / "token").write_text("read 0123456789abcdef\n")
    options = ("--token-file", str(tmp_path / "token"), "--upstream", host, "--log-format", "json")
    process = aimage("cache").start(
        "registry",
        "serve",
        "--addr",
        "127.0.0.1:0",
        *options,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    url = process.stdout.readline().rstrip("\n")
    answer = requests.get(f"{url}/v2/a/b/manifests/t", auth=("me", "0123456789abcdef"), timeout=60)
    process.send_signal(signal.SIGINT)
    out, log = process.communicate(timeout=60)
    assert (process.returncode, out, answer.content) == (0, "", raw)
    (line,) = [json.loads(line) for line in log.splitlines() if '"request"' in line]
    assert (line["method"], line["status"], line["sent"]) == ("GET", 200, len(raw))
    assert line["path"] == "/v2/a/b/manifests/t"
    assert line["route"] == "/v2/{name}/manifests/{reference}"
    assert "0123456789abcdef" not in log


@pytest.mark.integration
def test_command_line_serves_with_several_processes(
    tmp_path: Path, aimage: Callable[..., Aimage]
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = aimage("a").start(
        *("registry", "serve", "--addr", "127.0.0.1:0", "--metrics-addr", "127.0.0.1:0"),
        *("--processes", "2", "--log-format", "json"),
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    url = process.stdout.readline().rstrip("\n")
    assert requests.get(f"{url}/v2/", timeout=60).status_code == 200
    assert len(list(temporary.iterdir())) == 1
    process.send_signal(signal.SIGINT)
    out, log = process.communicate(timeout=60)
    assert (process.returncode, out, list(temporary.iterdir())) == (0, "", [])
    events = [json.loads(line) for line in log.splitlines()]
    assert [event["event"] for event in events].count("stopped") == 2
    [metrics] = {event["apart"][0] for event in events if event["event"] == "ready"}
    assert metrics.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--upstream", "https://host.example"), "invalid registry"),
        (("--plain-http",), "require --upstream"),
        (("--token-file", "/nonexistent"), "cannot read the tokens"),
        (("--processes", "many"), "expected auto, or a number"),
        (("--processes", "257"), "expected auto, or a number"),
    ],
)
def test_command_line_refuses_options(
    aimage: Callable[..., Aimage], options: tuple[str, ...], message: str
) -> None:
    done = aimage("a")("registry", "serve", *options, code=2)
    assert done.out == ""
    assert message in done.err


@pytest.mark.integration
def test_metrics_count_requests_bytes_and_uploads(
    tmp_path: Path, aimage: Callable[..., Aimage]
) -> None:
    here = aimage("a")
    here.environment["AIMAGE_REGISTRY_METRICS_ADDR"] = "127.0.0.1:0"
    process = here.start(
        *("registry", "serve", "--addr", "127.0.0.1:0", "--log-format", "json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    url = process.stdout.readline().rstrip("\n")
    line = next(line for line in process.stderr if '"ready"' in line)
    upload = f"{url}/v2/a/b/blobs/uploads/"
    requests.post(upload, timeout=60)
    requests.post(f"{upload}?digest={digest_of(b'x' * 1000)}", data=b"x" * 1000, timeout=60)
    requests.get(f"{url}/v2/a/b/blobs/{digest_of(b'x' * 1000)}", timeout=60)
    text = requests.get(json.loads(line)["apart"][0] + "/metrics", timeout=60).text
    assert requests.get(f"{url}/metrics", timeout=60).status_code == 200
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    route = 'route="/v2/{name}/blobs/uploads/"'
    assert f'aimage_registry_requests_total{{code="201",method="POST",{route}}} 1.0' in text
    assert f'aimage_registry_request_duration_seconds_count{{method="POST",{route}}} 2.0' in text
    assert 'aimage_registry_bytes_total{direction="received"} 1000.0' in text
    assert 'aimage_registry_bytes_total{direction="sent"} 1000.0' in text
    assert "aimage_registry_uploads 1.0" in text and "python_info{" in text


def test_a_registry_is_not_a_worker(server: Server) -> None:
    assert not WorkerClient(server.url).is_worker()


def test_aimage_pulls_and_pushes(server: Server, aimage: Callable[..., Aimage]) -> None:
    raw = server.push("t", b"x" * 100_000, b"y")
    host = server.url.removeprefix("http://")
    client = aimage("client")
    client("pull", f"{host}/a/b:t", "--quiet")
    client("tag", f"{host}/a/b:t", f"{host}/c/d:t2", "--quiet")
    client("push", f"{host}/c/d:t2", "--quiet")
    assert server.ask("GET", "/v2/c/d/manifests/t2").content == raw


def test_only_the_server_imports_aiohttp() -> None:
    program = (
        "import sys, clowder_aimage.distribution, clowder_aimage.layout\n"
        "import clowder_aimage.cli.verbs.registry\n"
        "sys.exit('aiohttp' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert run(command, cwd=REPOSITORY_ROOT).returncode == 0

"""Where the server listens, how it says so, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from served import REPOSITORY_ROOT, Server, digest_of, start

from clowder_aimage.distribution.registry_role import serve
from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.errors import AccessError, UsageError
from clowder_aimage.layout import ImageLayout
from tests.process import spawn


def never(url: str) -> None:
    raise AssertionError(f"it listens on {url}")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "my.host:0", "127.1:0"])
def test_other_addresses_need_a_flag(tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="no authentication") as caught:
        serve(ImageLayout(tmp_path), address, on_ready=never)
    assert caught.value.remedy == "registry_without_token"


@pytest.mark.parametrize("address", ["", "5000", ":5000", "localhost", "localhost:x", "a:65536"])
def test_what_is_not_an_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        serve(ImageLayout(tmp_path), address, on_ready=never)


def test_addresses() -> None:
    assert Endpoint.parse_listen("localhost:5000") == Endpoint("http", "127.0.0.1", 5000)
    assert Endpoint.parse_listen("[::1]:0") == Endpoint("http", "::1", 0)
    assert Endpoint.parse_listen("127.8.8.8:1").is_loopback
    assert Endpoint.parse_listen("[::1]:1").is_loopback
    assert not Endpoint.parse_listen("localhost.example:1").is_loopback


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AccessError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(ImageLayout(tmp_path), f"127.0.0.1:{port}", on_ready=never)


def test_ipv6(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
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


def test_remote_is_served_when_asked_for(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    server = serve_layout(tmp_path, "remote", address="0.0.0.0:0")
    server.url = f"http://127.0.0.1:{server.address[1]}"
    answer = server.ask("GET", "/v2/", headers={"Host": "registry.example"})
    assert answer.status_code == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly(
    tmp_path: Path, serve_layout: Callable[..., Server], number: signal.Signals
) -> None:
    server = serve_layout(tmp_path)
    server.push("t", b"x")  # leaves an idle keep-alive connection behind
    assert server.stop(number) == (0, "")


def test_an_empty_store_is_not_made_by_reading(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    server = serve_layout(tmp_path / "store")
    assert server.ask("GET", "/v2/_catalog").json() == {"repositories": []}
    assert server.ask("GET", f"/v2/a/blobs/{digest_of(b'')}").status_code == 404
    assert not (tmp_path / "store").exists()


def test_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a store")
    server = start(tmp_path / "file")
    try:
        with server.http:
            answer = server.ask("POST", "/v2/a/blobs/uploads/")
        assert answer.status_code == 500
        assert "not a directory" not in answer.text  # paths of this machine stay in the log
    finally:
        assert "is not a directory" in server.stop()[1]


AIMAGE = [sys.executable, "-c", "from clowder_aimage.cli.main import main; main()"]


def aimage(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*AIMAGE, *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_command_line_serves_until_interrupted(tmp_path: Path) -> None:
    command = [*AIMAGE, "registry", "serve", "--addr", "127.0.0.1:0", "--store", str(tmp_path)]
    process = spawn(
        command, cwd=REPOSITORY_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().rstrip("\n")
    with requests.Session() as http:
        Server(tmp_path, process, url, http).push("t", b"x")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0
    assert aimage("ls", "--json", "--store", str(tmp_path)).stdout.count("a/b:t") == 1


def test_command_line_refuses_other_machines(tmp_path: Path) -> None:
    done = aimage("registry", "serve", "--addr", "0.0.0.0:0", "--store", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--allow-remote" in done.stderr
    assert "--token-file" in done.stderr


def test_command_line_of_a_cache(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
    upstream = serve_layout(tmp_path / "upstream")
    raw = upstream.push("t", b"x")
    host = upstream.url.removeprefix("http://")
    (tmp_path / "token").write_text("0123456789abcdef\n")
    options = ("--token-file", str(tmp_path / "token"), "--upstream", host)
    command = [*AIMAGE, "registry", "serve", "--addr", "127.0.0.1:0", *options]
    process = spawn(
        [*command, "--store", str(tmp_path / "cache")],
        cwd=REPOSITORY_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().rstrip("\n")
    answer = requests.get(f"{url}/v2/a/b/manifests/t", auth=("me", "0123456789abcdef"), timeout=20)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert (process.returncode, answer.content) == (0, raw)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--upstream", "https://host.example"), "is not a registry"),
        (("--plain-http",), "are about an --upstream"),
        (("--token-file", "/nonexistent"), "cannot read the token"),
    ],
)
def test_command_lines_that_cannot_be_meant(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    done = aimage("registry", "serve", *options, "--store", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_our_own_client_pulls_and_pushes(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    server = serve_layout(tmp_path / "store")
    raw = server.push("t", b"x" * 100_000, b"y")
    host = server.url.removeprefix("http://")
    other = tmp_path / "other"
    for arguments in (
        ("pull", f"{host}/a/b:t"),
        ("tag", f"{host}/a/b:t", f"{host}/c/d:t2"),
        ("push", f"{host}/c/d:t2"),
    ):
        done = aimage(*arguments, "--quiet", "--store", str(other))
        assert done.returncode == 0, done.stderr
    assert server.ask("GET", "/v2/c/d/manifests/t2").content == raw


def test_aiohttp_is_loaded_by_the_server_alone() -> None:
    program = (
        "import sys, clowder_aimage.distribution, clowder_aimage.layout\n"
        "import clowder_aimage.cli.verbs.registry\n"
        "sys.exit('aiohttp' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=REPOSITORY_ROOT, check=False).returncode == 0

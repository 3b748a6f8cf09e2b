"""Files from URLs: limits of hosts, addresses, size and time."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from clowder_aimage.errors import (
    AImageError,
    ForbiddenError,
    NetworkError,
    NotFoundError,
    RegistryError,
    TooLargeError,
    UnauthorizedError,
    UsageError,
)
from clowder_aimage.registry import ClientOptions, web_file
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.reach import Reach
from clowder_aimage.registry.web_file import InputHosts, fetch
from tests.scripted import Answer, ScriptedRegistry

LIMIT = 1000


@pytest.fixture
def server() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry(lambda _: Answer(200, {}, b"a picture")).running() as found:
        yield found


def to(location: str, status: int = 302) -> Callable[[Any], Answer]:
    return lambda _: Answer(status, {"Location": location})


def get(server: ScriptedRegistry, hosts: InputHosts | None = None, path: str = "/a.png") -> bytes:
    return fetch(f"http://{server.host}{path}", ClientOptions(), limit=LIMIT, hosts=hosts)


def test_a_file_is_fetched_without_credentials(server: ScriptedRegistry) -> None:
    secret = ClientOptions(basic_auth="c2VjcmV0", headers={"X-Secret": "1"})
    assert fetch(f"http://{server.host}/a.png?q=1", secret, limit=LIMIT) == b"a picture"
    (seen,) = server.seen
    assert seen.path == "/a.png?q=1"
    assert not {"authorization", "x-secret"} & {name.lower() for name in seen.headers}


def test_a_body_that_ends_early_is_said_in_words(server: ScriptedRegistry) -> None:
    server.script = lambda _: Answer(200, {}, b"a picture of circles", cut=9)
    with pytest.raises(NetworkError) as raised:
        get(server)
    assert raised.value.message.endswith("ended early, after 9 bytes of 20")


def test_a_redirect_is_followed_on_its_host(server: ScriptedRegistry) -> None:
    server.script = lambda seen: (
        Answer(200, {}, b"there") if seen.path == "/b" else Answer(307, {"Location": "b"})
    )
    assert get(server) == b"there"
    hosts = InputHosts.parse([server.host])
    assert get(server, hosts) == b"there"


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://169.254.169.254/",
        "https://[fe80::1]/",
        "https://10.0.0.1/a.png",
        "http://example.com/a.png",
        "file:///etc/passwd",
        "ftp://example.com/",
    ],
)
@pytest.mark.parametrize("is_worker", [False, True])
def test_a_redirect_to_an_address_inside_is_refused(
    server: ScriptedRegistry,
    location: str,
    is_worker: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is connected to."""
    server.script = to(location)
    hosts = InputHosts.parse([server.host, "*", "http://*"]) if is_worker else None
    if is_worker and "example.com" in location:
        hosts = InputHosts.parse([server.host])
    own = socket.socket.connect

    def connect(sock: socket.socket, address: tuple[str, int]) -> None:
        assert address[0] == "127.0.0.1", address
        own(sock, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(ForbiddenError):
        get(server, hosts)


def test_a_name_that_resolves_inside_is_refused(server: ScriptedRegistry) -> None:
    port = int(server.host.rpartition(":")[2])
    there = ClientOptions(addresses={("pictures.example.com", port): "127.0.0.1"})
    url = f"http://pictures.example.com:{port}/a.png"
    pattern = InputHosts.parse([f"http://*.example.com:{port}"])
    with pytest.raises(ForbiddenError, match="is at an internal address"):
        fetch(url, there, limit=LIMIT, hosts=pattern)
    assert not server.seen
    named = InputHosts.parse([f"http://pictures.example.com:{port}"])
    assert fetch(url, there, limit=LIMIT, hosts=named) == b"a picture"


@pytest.mark.parametrize("entry", ["http://*", "http://*.example.com"])
def test_behind_a_proxy_a_pattern_allows_no_host(
    server: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """The proxy resolves names, so that their addresses cannot be checked."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://{server.host}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    url, there = "http://pictures.example.com/a.png", ClientOptions()
    with pytest.raises(ForbiddenError, match="through a proxy, so that its address") as raised:
        fetch(url, there, limit=LIMIT, hosts=InputHosts.parse([entry]))
    assert raised.value.facts["host"] == "pictures.example.com"
    assert not server.seen
    named = InputHosts.parse([entry, "http://pictures.example.com"])
    assert fetch(url, there, limit=LIMIT, hosts=named) == b"a picture"
    assert fetch(f"http://{server.host}/a.png", there, limit=LIMIT) == b"a picture"  # without it


def test_a_redirect_to_a_host_that_is_not_allowed_is_refused(server: ScriptedRegistry) -> None:
    server.script = to("https://elsewhere.example/a.png")
    with pytest.raises(ForbiddenError, match=r"leads to the host https://elsewhere\.example:443"):
        get(server, InputHosts.parse([server.host]))


def test_no_host_is_allowed_by_default(server: ScriptedRegistry) -> None:
    with pytest.raises(ForbiddenError) as raised:
        get(server, InputHosts())
    assert raised.value.remedy == "allow_input"
    assert not server.seen


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://example.com/a.png", UsageError),
        ("https:///a.png", UsageError),
        ("https://user:s3cret@example.com/a.png", UsageError),
        ("https://example.com:99999/a.png", UsageError),
        ("https://exämple.com/a.png", UsageError),
        ("https://../a.png", UsageError),
        ("https://example.com/a b.png", UsageError),
        ("https://[::1/a.png", UsageError),
        (f"https://example.com/{'a' * 9000}", UsageError),
    ],
)
def test_an_invalid_url_is_refused(url: str, error: type[AImageError]) -> None:
    with pytest.raises(error) as raised:
        fetch(url, ClientOptions(), limit=LIMIT)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(404), NotFoundError),
        (Answer(401), UnauthorizedError),
        (Answer(403), UnauthorizedError),
        (Answer(500), RegistryError),
        (Answer(204), RegistryError),
        (Answer(302), RegistryError),
        (Answer(200, {}, bytes(LIMIT + 1)), TooLargeError),
        (Answer(200, {"Content-Length": str(1 << 40)}, b"", flood=1 << 30), TooLargeError),
        (Answer(302, {"Location": "/a.png"}), NetworkError),
        (Answer(302, {"Location": "https://[::1/"}), NetworkError),
        (Answer(200, {}, b"a picture", cut=3), NetworkError),
    ],
)
def test_an_answer_without_a_file_is_an_error(
    server: ScriptedRegistry, answer: Answer, error: type[AImageError]
) -> None:
    server.script = lambda _: answer
    with pytest.raises(error) as raised:
        get(server, path="/a.png?signature=secret")
    assert "secret" not in str(raised.value)
    assert server.flooded < 1 << 26


def test_a_body_without_a_length_is_limited(server: ScriptedRegistry) -> None:
    chunked = {"Transfer-Encoding": "chunked", "Content-Length": "0"}
    body = b"%x\r\n%s\r\n" % (LIMIT + 1, bytes(LIMIT + 1)) + b"0\r\n\r\n"
    server.script = lambda _: Answer(200, chunked, body)
    with pytest.raises(TooLargeError):
        get(server)


def test_a_slow_body_is_given_up(server: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_file, "_READ_TIMEOUT", 0.05)
    server.script = lambda _: Answer(200, {}, b"a picture", cut=3, hang=True)
    with pytest.raises(NetworkError):
        get(server)


def test_a_certificate_is_verified(server: ScriptedRegistry, tmp_path: Path) -> None:
    """Only an authority that the configuration names for the host is trusted."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server.wrap(context)
    url = f"https://{server.host}/a.png"
    with pytest.raises(NetworkError, match="cannot verify the certificate") as raised:
        fetch(url, ClientOptions(insecure=True), limit=LIMIT)
    assert raised.value.remedy == ""
    known = ClientOptions(registries={server.host: HostSettings(ca_file=tmp_path / "ca.pem")})
    assert fetch(url, known, limit=LIMIT) == b"a picture"
    server.script = to(f"http://{server.host}/a.png")
    with pytest.raises(ForbiddenError, match="leads to http://"):
        fetch(url, known, limit=LIMIT, hosts=InputHosts.parse([f"http://{server.host}"]))


def test_bytes_that_drip_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives within the timeout of a read, and all of them do not."""
    monkeypatch.setattr(web_file, "_READ_TIMEOUT", 0.2)
    monkeypatch.setattr(web_file, "_RATE", LIMIT * 1000)
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.recv(65536)
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
            while not over.wait(0.02):
                sock.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(NetworkError, match="does not answer in time"):
            fetch(f"http://127.0.0.1:{port}/a.png", ClientOptions(), limit=LIMIT)
        over.set()
        thread.join(60)


@pytest.mark.parametrize(
    ("entry", "url", "reach"),
    [
        ("example.com", ("https", "example.com", 443), Reach.MACHINE),
        ("Example.com", ("https", "example.com", 443), Reach.MACHINE),
        ("example.com", ("https", "example.com", 8443), None),
        ("example.com:8443", ("https", "example.com", 8443), Reach.MACHINE),
        ("example.com", ("http", "example.com", 80), None),
        ("http://example.com", ("http", "example.com", 80), Reach.MACHINE),
        ("example.com", ("https", "a.example.com", 443), None),
        ("*.example.com", ("https", "a.example.com", 443), Reach.INTERNET),
        ("*.example.com", ("https", "example.com", 443), None),
        ("*.example.com", ("https", "aexample.com", 443), None),
        ("*", ("https", "10.0.0.1", 443), Reach.INTERNET),
        ("10.0.0.1", ("https", "10.0.0.1", 443), Reach.NOWHERE),
        ("[fe80::1]", ("https", "fe80::1", 443), Reach.NOWHERE),
        ("localhost:80", ("http", "localhost", 80), Reach.MACHINE),
    ],
)
def test_the_hosts_that_an_entry_means(
    entry: str, url: tuple[str, str, int], reach: Reach | None
) -> None:
    assert InputHosts.parse([entry]).reach(*url) == reach


@pytest.mark.parametrize("entry", ["", "https://example.com", "a b", "*.*", "a/b", "a:b", "*a.com"])
def test_an_invalid_entry_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="invalid host"):
        InputHosts.parse([entry])

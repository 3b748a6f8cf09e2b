"""Proxies: the variables as tools in Go read them, and errors that name the proxy.

Sources: golang.org/x/net/http/httpproxy (proxy_test.go); reports of ollama (#6368) and request
(#2194).
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clowder_aimage.errors import AImageError, NetworkError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.proxy import find_proxy, is_excepted
from clowder_aimage.registry.reach import OutsideError
from clowder_aimage.registry.retry import BrokenOffError
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving, skip_waiting

# entry of NO_PROXY: the hosts that are reached directly, the others
EXCEPTIONS = {
    "": ("localhost localhost:5000 127.0.0.1 127.8.9.1 [::1]:5000", "example.com 10.0.0.1"),
    "*": ("example.com 10.0.0.1 [2001:db8::1]", ""),
    "x.test, *": ("example.com", ""),
    "example.com": ("example.com a.example.com a.b.example.com EXAMPLE.COM", "anexample.com"),
    "EXAMPLE.com": ("example.com", "example.org"),
    ".example.com": ("a.example.com", "example.com anexample.com"),
    "*.example.com": ("a.example.com a.b.example.com", "example.com anexample.com"),
    "*.test": ("reg.test reg.test:5000", "test reg.testing"),
    "*example.com": ("", "example.com a.example.com anexample.com"),
    "example.com.": ("example.com", "example.org"),
    "example.com:5000": ("example.com:5000 a.example.com:5000", "example.com example.com:5001"),
    "*.example.com:443": ("a.example.com", "a.example.com:5000"),
    ".example.com:443": ("a.example.com a.example.com:443", "a.example.com:5000"),
    "  a.test ,b.test , ": ("a.test b.test", "c.test"),
    "a.test b.test": ("a.test b.test", "c.test"),
    "10.0.0.1": ("10.0.0.1 10.0.0.1:5000", "10.0.0.2 10.0.0.10"),
    "10.0.0.1:5000": ("10.0.0.1:5000", "10.0.0.1"),
    "10.0.0.0/8": ("10.1.2.3 10.1.2.3:5000 [::ffff:10.1.2.3]", "11.0.0.1 ten.example.com"),
    "10.1.2.3/8": ("10.9.9.9", "11.0.0.1"),
    "10.0.0.0/99": ("", "10.0.0.1"),
    "2001:db8::1": ("[2001:db8::1] [2001:db8:0::1]:5000", "[2001:db8::2]"),
    "[2001:db8::1]": ("[2001:db8::1]", "[2001:db8::2]"),
    "[2001:db8::1]:5000": ("[2001:db8::1]:5000", "[2001:db8::1]"),
    "2001:db8::/32": ("[2001:db8:1::9]", "[2001:db9::1] 10.0.0.1"),
    ":80, ., , *.": ("", "example.com 10.0.0.1"),
}


def find(host: str, environment: dict[str, str]) -> str:
    return find_proxy(f"https://{host}/v2/", environment)


@pytest.mark.parametrize("entry", EXCEPTIONS)
def test_exceptions_are_read_as_by_go(entry: str) -> None:
    environment = {"HTTPS_PROXY": "http://proxy.test:3128", "NO_PROXY": entry}
    direct, proxied = EXCEPTIONS[entry]
    for host in direct.split():
        assert find(host, environment) == "", host
    for host in proxied.split():
        assert find(host, environment) == "http://proxy.test:3128", host


def test_a_host_is_excepted_at_the_port_of_its_scheme() -> None:
    assert is_excepted("a.test", "443", "a.test:443")
    assert find_proxy("http://a.test/", {"http_proxy": "p:1", "no_proxy": "a.test:80"}) == ""


# variables: the proxy of https://example.com
VARIABLES: list[tuple[dict[str, str], str]] = [
    ({}, ""),
    ({"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
    ({"https_proxy": "http://p:1"}, "http://p:1"),
    ({"https_proxy": "http://p:1", "HTTPS_PROXY": "http://q:2"}, "http://p:1"),
    ({"https_proxy": "", "HTTPS_PROXY": "http://q:2"}, "http://q:2"),
    ({"http_proxy": "http://p:1"}, ""),
    ({"ALL_PROXY": "http://p:1"}, "http://p:1"),
    ({"all_proxy": "http://p:1", "https_proxy": "http://q:2"}, "http://q:2"),
    ({"HTTPS_PROXY": "p:1"}, "http://p:1"),
    ({"HTTPS_PROXY": "p"}, "http://p"),
    ({"HTTPS_PROXY": " p:1 "}, "http://p:1"),
    ({"HTTPS_PROXY": "[::1]:3128"}, "http://[::1]:3128"),
    ({"HTTPS_PROXY": "https://p:1"}, "https://p:1"),
    ({"HTTPS_PROXY": "http://u:p%40ss@p:1"}, "http://u:p%40ss@p:1"),
    ({"ALL_PROXY": "socks5://p:1"}, "socks5h://p:1"),
    ({"ALL_PROXY": "socks5h://p:1"}, "socks5h://p:1"),
    ({"ALL_PROXY": "p:1", "no_proxy": "", "NO_PROXY": "example.com"}, ""),
]


@pytest.mark.parametrize(("environment", "proxy"), VARIABLES)
def test_the_proxy_is_that_of_the_variables(environment: dict[str, str], proxy: str) -> None:
    assert find("example.com", environment) == proxy


def test_the_header_of_a_client_is_no_proxy() -> None:
    """A CGI script gets the header Proxy as HTTP_PROXY (CVE-2016-5385)."""
    forged = {"HTTP_PROXY": "http://p:1", "REQUEST_METHOD": "GET"}
    assert find_proxy("http://example.com/", forged) == ""


@pytest.mark.parametrize(
    "value", ["http://", "ftp://p:1", "http://p:x", "http://p:99999", "://p", "http://u:s/cret@p"]
)
def test_a_variable_without_a_proxy_is_an_error_without_its_value(value: str) -> None:
    with pytest.raises(UsageError, match="HTTPS_PROXY is not the URL of a proxy") as caught:
        find("example.com", {"HTTPS_PROXY": value})
    assert value not in str(caught.value)


# -- requests

Attempt = Callable[..., None]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Return ``attempt(proxy, host)``, which resolves a name by a proxy."""
    for name in ("http", "https", "all", "no"):
        for variable in (f"{name}_proxy", f"{name.upper()}_PROXY"):
            monkeypatch.delenv(variable, raising=False)

    def resolve(proxy: str, *, host: str = "reg.test", plain_http: bool = False) -> None:
        monkeypatch.setenv("ALL_PROXY", proxy)
        reference = Reference.parse(f"{host}/team/x:v1")
        options = ClientOptions(docker_config=tmp_path, plain_http=plain_http)
        with Repository(reference, options) as repository:
            repository.resolve(reference)

    return resolve


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Run a proxy that sends ``answer`` to every request; yield its host and port."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


REFUSALS: list[tuple[bool, bytes, type[NetworkError], str]] = [
    (False, b"407 Proxy Authentication Required", NetworkError, "requires a name and a password"),
    (True, b"407 Proxy Authentication Required", NetworkError, "requires a name and a password"),
    (False, b"403 Forbidden", NetworkError, "refuses to connect to reg.test: 403 Forbidden"),
    (False, b"405 Method Not Allowed", NetworkError, "refuses to connect to reg.test: 405"),
    (False, b"501 Unsupported method", NetworkError, "refuses to connect to reg.test: 501"),
    (False, b"502 Bad Gateway", BrokenOffError, "cannot reach reg.test: 502 Bad Gateway"),
    (False, b"503 ", BrokenOffError, "cannot reach reg.test: 503"),
]


@pytest.mark.parametrize(("plain_http", "status", "kind", "message"), REFUSALS)
def test_a_refusal_names_the_proxy(
    plain_http: bool, status: bytes, kind: type[NetworkError], message: str, attempt: Attempt
) -> None:
    answer = b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with answering(answer) as proxy, pytest.raises(kind) as caught:
        attempt(f"http://user:secret@{proxy}", plain_http=plain_http)
    assert type(caught.value) is kind
    assert f"the proxy {proxy} {message}" in str(caught.value)
    assert "secret" not in f"{caught.value} {caught.value.hint}"


def answer_as(status: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    lines = (b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), b"Connection: close")
    return b"\r\n".join((*lines, *headers, b"", body))


SQUID = b"X-Squid-Error: ERR_ACCESS_DENIED 0"
PORTAL = b"Location: http://reg.test/login"
# Without TLS or with it, what the proxy sends, and the message around its name
ANSWERS: dict[str, tuple[bool, bytes, str]] = {
    "it closes": (False, b"", "connection to reg.test through the proxy PROXY lost"),
    "it closes, without TLS": (True, b"", "cannot reach the proxy PROXY: Remote end closed"),
    "another protocol": (False, b"SSH-2.0-OpenSSH_9\r\n", "reg.test through the proxy PROXY"),
    "no TLS behind it": (
        False,
        b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 400 Bad Request\r\n\r\n",
        "reg.test through the proxy PROXY",
    ),
    "its page": (
        True,
        answer_as(b"403 Forbidden", SQUID, body=b"<html>Denied</html>"),
        "denied access to manifest reg.test/team/x:v1 (403) through the proxy PROXY: Denied",
    ),
    "its 404": (True, answer_as(b"404 Not Found"), "(404) through the proxy PROXY"),
    "its outage": (True, answer_as(b"500 Error", SQUID), "team/x:v1 through the proxy PROXY"),
    "a page of success": (
        True,
        answer_as(b"200 OK", b"Content-Type: text/html", body=b"<html>Login</html>"),
        "answered 200 OK for manifest reg.test/team/x:v1 through the proxy PROXY: Login",
    ),
    "a portal": (
        True,
        answer_as(b"302 Found", PORTAL),
        "request to reg.test through the proxy PROXY failed: more than 5 redirects",
    ),
}


@pytest.mark.parametrize("situation", ANSWERS)
def test_an_answer_of_a_proxy_names_it(
    situation: str, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waiting(monkeypatch)
    plain_http, answer, message = ANSWERS[situation]
    with answering(answer) as proxy, pytest.raises(AImageError) as caught:
        attempt(f"http://user:secret@{proxy}", plain_http=plain_http)
    assert message.replace("PROXY", proxy) in str(caught.value)
    assert "secret" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("plain_http", [True, False])
def test_a_proxy_that_is_down_is_named(plain_http: bool, attempt: Attempt) -> None:
    with pytest.raises(NetworkError) as caught:
        attempt("http://user:secret@127.0.0.1:1", plain_http=plain_http)
    assert str(caught.value) == "cannot reach the proxy 127.0.0.1:1: Connection refused"
    assert "NO_PROXY" in str(caught.value.hint)


def test_a_proxy_without_an_address_is_named(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(NetworkError, match=r"cannot reach the proxy proxy\.test:3128: Name"):
        attempt("proxy.test:3128")


def test_a_socks_proxy_without_its_package_names_the_extra(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"SOCKS proxy .* needs the extra") as caught:
        attempt("socks5://user:secret@127.0.0.1:1")
    assert caught.value.facts == {"extra": "socks"}


def test_a_socks_proxy_is_not_asked_for_an_address_inside(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    reference = Reference.parse("reg.test/x")
    with (
        Repository(reference, ClientOptions(docker_config=tmp_path)) as repository,
        pytest.raises(OutsideError),
    ):
        repository._session.request("GET", "http://169.254.169.254/latest")


# -- a proxy for SOCKS (RFC 1928), which connects to the registry whatever the name


class SocksProxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    target = ("", 0)
    reply = 0
    names: list[str]


class SocksHandler(socketserver.StreamRequestHandler):
    server: SocksProxy

    def handle(self) -> None:
        _, count = self.rfile.read(2)
        self.rfile.read(count)
        self.wfile.write(b"\x05\x00")
        self.rfile.read(4)
        self.server.names.append(self.rfile.read(self.rfile.read(1)[0]).decode())
        self.rfile.read(2)
        self.wfile.write(bytes((5, self.server.reply, 0, 1, 0, 0, 0, 0, 0, 0)))
        if self.server.reply:
            return
        with socket.create_connection(self.server.target) as registry:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += self.rfile.readline()
            registry.sendall(request)
            while data := registry.recv(65536):
                self.wfile.write(data)


@pytest.fixture
def socks() -> Iterator[SocksProxy]:
    pytest.importorskip("socks", reason="PySocks is not installed")
    with SocksProxy(("127.0.0.1", 0), SocksHandler) as server:
        server.names = []
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_socks_proxy_resolves_the_name(socks: SocksProxy, attempt: Attempt) -> None:
    serve = serving(*artifact(b"{}", b"weights"))

    def script(seen: Seen) -> Answer:
        answer = serve(seen)
        return Answer(
            answer.status, answer.headers | {"Connection": "close"}, answer.body, cut=4096
        )

    with ScriptedRegistry(script).running() as registry:
        host, _, port = registry.host.rpartition(":")
        socks.target = (host, int(port))
        attempt(f"socks5://127.0.0.1:{socks.server_address[1]}", plain_http=True)
    assert socks.names == ["reg.test"]


@pytest.mark.parametrize(
    ("reply", "reason"), [(2, "not allowed"), (4, "unreachable"), (5, "refused")]
)
def test_a_socks_proxy_that_refuses_is_named(
    reply: int, reason: str, socks: SocksProxy, attempt: Attempt
) -> None:
    socks.reply = reply
    port = socks.server_address[1]
    with pytest.raises(AImageError) as caught:
        attempt(f"socks5://127.0.0.1:{port}", plain_http=True)
    assert str(caught.value).startswith(f"the proxy 127.0.0.1:{port} cannot reach reg.test: ")
    assert reason in str(caught.value)

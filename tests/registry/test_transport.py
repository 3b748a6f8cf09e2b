"""Timeouts of the steps of a request, and closing of connections."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.client_options import open_pools
from clowder_aimage.registry.connection import SEND_TIMEOUT
from clowder_aimage.registry.connection_pool import ConnectionPools
from clowder_aimage.registry.session import (
    CONNECT_TIMEOUT,
    FIRST_READ_TIMEOUT,
    READ_TIMEOUT,
    Session,
)
from clowder_aimage.registry.transport import Transport
from tests.scripted import Answer, ScriptedRegistry

if TYPE_CHECKING:
    from urllib3 import Timeout

    from clowder_aimage.registry.response import RegistryResponse


HOST = "0.0.0.0"  # noqa: S104
BODY = bytes(5000)


@pytest.fixture(params=["plain", "tls"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    """Return a session to a registry that accepts everything."""
    registry = ScriptedRegistry(lambda seen: Answer(201 if seen.body else 200))
    options: dict[str, Any] = {}
    if request.param == "tls":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        options["ca_file"] = tmp_path / "ca.pem"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(HOST).configure_cert(context)
        registry.wrap(context)
        registry.host = f"{HOST}:{registry.host.rpartition(':')[2]}"
    connection = ClientOptions(docker_config=tmp_path, **options)
    with (
        registry.running(),
        Session(Reference.parse(f"{registry.host}/x"), connection) as session,
    ):
        yield session


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the socket timeout at each large write."""
    timeouts = []
    for kind in (socket.socket, ssl.SSLSocket):
        real = kind.sendall

        def sendall(self: Any, data: Any, *flags: Any, real: Callable[..., None] = real) -> None:
            if len(data) == len(BODY):
                timeouts.append(self.gettimeout())
            return real(self, data, *flags)

        monkeypatch.setattr(kind, "sendall", sendall)
    return timeouts


def put(session: Session) -> None:
    response = session.request("PUT", session.build_url("manifests/v1"), body=BODY)
    assert response.status_code == 201
    response.close()


def get(session: Any) -> None:
    response = session.request("GET", session.build_url("tags/list"))
    response.raw.read()
    response.raw.release_conn()


def test_a_body_has_a_longer_timeout_than_connecting(session: Session, sent: Any) -> None:
    put(session)
    assert SEND_TIMEOUT > CONNECT_TIMEOUT
    assert sent == [SEND_TIMEOUT]


def test_a_body_on_a_reused_connection_has_the_write_timeout(session: Session, sent: Any) -> None:
    get(session)
    put(session)
    assert sent == [SEND_TIMEOUT]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Record the read timeout of each request."""
    seconds, real = [], Transport.send

    def send(self: Transport, *arguments: Any, timeout: Timeout) -> RegistryResponse:
        seconds.append(timeout.read_timeout)
        return real(self, *arguments, timeout=timeout)

    monkeypatch.setattr(Transport, "send", send)
    return seconds


def test_the_first_request_has_a_short_read_timeout(
    session: Session, reads: list[float | None]
) -> None:
    get(session)
    get(session)
    assert reads == [FIRST_READ_TIMEOUT, READ_TIMEOUT]


@pytest.mark.parametrize("body", [BODY, b""], ids=["some", "empty"])
def test_a_first_request_with_a_body_has_the_full_read_timeout(
    body: bytes, session: Session, reads: list[float | None]
) -> None:
    """The registry processes the body before it responds."""
    session.request("PUT", session.build_url("manifests/v1"), body=body).close()
    assert reads == [READ_TIMEOUT]


def test_a_caller_can_extend_the_read_timeout(session: Session, reads: list[float | None]) -> None:
    session.request("PUT", session.build_url("manifests/v1"), body=BODY, read_timeout=500.0).close()
    assert reads == [500.0]


# -- proxies


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[ConnectionPools]:
    with open_pools(ClientOptions(docker_config=tmp_path), "r.example.com") as pools:
        yield pools


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_connections_use_our_connection_class(scheme: str, pools: ConnectionPools) -> None:
    pool = pools.get(f"{scheme}://r.example.com/", "http://proxy.example.com:3128")
    plain = pools.get(f"{scheme}://r.example.com/", "")
    assert pool.ConnectionCls.response_class is plain.ConnectionCls.response_class
    assert pool.ConnectionCls.addresses == {}


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_socks_connections_use_their_class_with_deadlines(
    scheme: str, pools: ConnectionPools
) -> None:
    """Our connection class alone would bypass the SOCKS proxy."""
    socks = pytest.importorskip("urllib3.contrib.socks", exc_type=ImportError)
    proxy = f"{scheme}://proxy.example.com:1080"
    for kind in (socks.SOCKSConnection, socks.SOCKSHTTPSConnection):
        url = f"http{'s' * (kind is socks.SOCKSHTTPSConnection)}://r.example.com/"
        found = pools.get(url, proxy).ConnectionCls
        assert issubclass(found, kind)
        assert found.response_class is not kind.response_class


def test_closing_closes_proxy_connections(pools: ConnectionPools) -> None:
    proxies = ("http://one.example.com:3128", "http://other.example.com:3128", "")
    opened = [pools.get("http://r.example.com/", proxy) for proxy in proxies]
    assert all(pool.pool is not None for pool in opened)
    pools.close()
    assert [pool.pool for pool in opened] == [None] * 3


def test_a_name_and_a_password_of_a_proxy_are_decoded(pools: ConnectionPools) -> None:
    pool = pools.get("http://r.example.com/", "http://a%40b:c%3Ad@proxy.example.com:3128")
    assert pool.proxy_headers == {"proxy-authorization": "Basic YUBiOmM6ZA=="}
    assert pools.get("http://r.example.com/", "http://p.example.com:3128").proxy_headers == {}


def test_macos_has_the_proxy_of_its_settings(
    pools: ConnectionPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://p.example.com:1"})
    monkeypatch.setattr("urllib.request.proxy_bypass", lambda host: host == "inside.example.com")
    assert pools.find_proxy("http://r.example.com/") == ""
    monkeypatch.setattr("sys.platform", "darwin")
    assert pools.find_proxy("http://r.example.com/") == "http://p.example.com:1"
    for url in ("https://r.example.com/", "http://inside.example.com/", "http://127.0.0.1:5000/"):
        assert pools.find_proxy(url) == ""


def test_a_missing_file_of_authorities_is_named(pools: ConnectionPools) -> None:
    pools.verify = "/nonexistent/ca.pem"
    with pytest.raises(OSError, match=r"/nonexistent/ca\.pem"):
        pools.get("https://r.example.com/", "")
    pools.get("http://r.example.com/", "")

"""One request: how long each of its steps may take, and what is closed in the end."""

from __future__ import annotations

import socket
import ssl

import pytest
import trustme

from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.client_options import open_session
from clowder_aimage.registry.session import (
    CONNECT_TIMEOUT,
    FIRST_READ_TIMEOUT,
    READ_TIMEOUT,
    Session,
)
from clowder_aimage.registry.transport import POOLS, SEND_TIMEOUT, Transport
from tests.scripted import Answer, ScriptedRegistry

HOST = "0.0.0.0"  # noqa: S104
BODY = bytes(5000)


@pytest.fixture(params=["plain", "tls"])
def session(request, tmp_path):
    """To a registry that takes everything."""
    registry = ScriptedRegistry(lambda seen: Answer(201 if seen.body else 200))
    options = {}
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
def sent(monkeypatch):
    """The timeout under which a socket was given each large piece."""
    timeouts = []
    for kind in (socket.socket, ssl.SSLSocket):
        real = kind.sendall

        def sendall(self, data, *flags, real=real):
            if len(data) == len(BODY):
                timeouts.append(self.gettimeout())
            return real(self, data, *flags)

        monkeypatch.setattr(kind, "sendall", sendall)
    return timeouts


def put(session):
    response = session.request("PUT", session.url("manifests/v1"), body=BODY)
    assert response.status_code == 201
    response.close()


def get(session):
    response = session.request("GET", session.url("tags/list"))
    response.raw.read()
    response.raw.release_conn()


def test_a_body_has_longer_than_a_connection_to_be_made(session, sent):
    put(session)
    assert SEND_TIMEOUT > CONNECT_TIMEOUT
    assert sent == [SEND_TIMEOUT]


def test_a_body_over_a_connection_that_is_used_again(session, sent):
    get(session)
    put(session)
    assert sent == [SEND_TIMEOUT]


@pytest.fixture
def reads(monkeypatch):
    """For how long the answer to each request may keep us waiting."""
    seconds, real = [], Transport.send

    def send(self, *arguments, timeout):
        seconds.append(timeout.read_timeout)
        return real(self, *arguments, timeout=timeout)

    monkeypatch.setattr(Transport, "send", send)
    return seconds


def test_a_first_look_tells_soon_that_nobody_answers(session, reads):
    get(session)
    get(session)
    assert reads == [FIRST_READ_TIMEOUT, READ_TIMEOUT]


@pytest.mark.parametrize("body", [BODY, b""], ids=["some", "empty"])
def test_a_first_request_with_a_body_is_waited_for(body, session, reads):
    """The registry has something to do with it before it can answer."""
    session.request("PUT", session.url("manifests/v1"), body=body).close()
    assert reads == [READ_TIMEOUT]


def test_a_caller_may_wait_longer_for_what_it_sent(session, reads):
    session.request("PUT", session.url("manifests/v1"), body=BODY, read_timeout=500.0).close()
    assert reads == [500.0]


# -- proxies


@pytest.fixture
def adapter(tmp_path):
    session = open_session(ClientOptions(docker_config=tmp_path), "r.example.com")
    yield session.get_adapter("https://r.example.com/")
    session.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_connections_through_a_proxy_are_ours(scheme, adapter):
    manager = adapter.proxy_manager_for("http://proxy.example.com:3128")
    pool = manager.connection_from_url(f"{scheme}://r.example.com/")
    assert type(pool) is POOLS[scheme]


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_connections_through_socks_are_its_own(scheme, adapter):
    """Ours would go past it."""
    socks = pytest.importorskip("urllib3.contrib.socks", exc_type=ImportError)
    manager = adapter.proxy_manager_for(f"{scheme}://proxy.example.com:1080")
    assert type(manager) is socks.SOCKSProxyManager
    for scheme, kind in (("http", socks.SOCKSConnection), ("https", socks.SOCKSHTTPSConnection)):
        assert manager.connection_from_url(f"{scheme}://r.example.com/").ConnectionCls is kind


def test_closing_closes_the_connections_of_proxies_too(adapter):
    pools = [
        adapter.proxy_manager_for(proxy).connection_from_url("http://r.example.com/")
        for proxy in ("http://one.example.com:3128", "http://other.example.com:3128")
    ]
    pools.append(adapter.poolmanager.connection_from_url("http://r.example.com/"))
    assert all(pool.pool is not None for pool in pools)
    adapter.close()
    assert [pool.pool for pool in pools] == [None] * 3

"""Requests to other nodes, and validation of their responses."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry.peer import (
    PeerClient,
    PeerError,
    PeerRange,
    PeerReader,
    PeerRefusal,
    PeerTimeouts,
)
from tests.node.nodes import fleet
from tests.scripted import Answer, ScriptedRegistry

ME, OTHER = "0" * 32, "1" * 32
DIGEST = Digest.of(b"a blob")
CONTENT = Descriptor("application/octet-stream", DIGEST, 100)
SPAN = PeerRange(Reference.parse("registry.example.com:5000/a/b:1"), CONTENT, 3, 10)
PARTIAL = {"Content-Range": "bytes 3-9/100"}
SHORT = PeerTimeouts(ping=2, range=1, stall=1)


@contextlib.contextmanager
def answering(*answers: Any) -> Iterator[str]:
    """Run a server that sends one response per connection; None means no response."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            for said in answers:
                with contextlib.suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(65536)
                        if said is None:
                            ended.wait(60)
                        else:
                            connection.sendall(said)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # ends accept()
    thread.join(60)


@contextlib.contextmanager
def answered(answer: Answer, **options: Any) -> Iterator[tuple[PeerClient, str, ScriptedRegistry]]:
    """Yield a client, and the URL of a server that always sends the same response."""
    with (
        ScriptedRegistry(lambda _: answer).running() as server,
        contextlib.closing(PeerClient(ME, "token", timeouts=SHORT, **options)) as client,
    ):
        yield client, f"http://{server.host}", server


def head(status: str, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: 0\r\n\r\n".encode()


PONG = head("200 OK", f"Aimage-Node: {OTHER}\r\n")


@pytest.mark.integration
@pytest.mark.parametrize(
    "said",
    [
        None,
        b"SSH-2.0-OpenSSH_9.2\r\n",
        head("200 OK", "Aimage-Node: ../../etc\r\n"),
        head("302 Found", f"Location: http://169.254.169.254/\r\nAimage-Node: {OTHER}\r\n"),
        head("401 no", 'WWW-Authenticate: Basic realm="http://169.254.169.254/"\r\n'),
        b"HTTP/1.1 200 OK\r\n" + b"X-Y: z\r\n" * 1000 + b"\r\n",
    ],
)
def test_a_ping_without_a_valid_answer_fails(said: bytes | None) -> None:
    with answering(said, said) as url:
        client = PeerClient(ME, "token", timeouts=SHORT)
        with contextlib.closing(client), pytest.raises(PeerError):
            client.ping(url)


def test_a_span_is_requested_with_ns_range_and_token() -> None:
    with answered(Answer(206, PARTIAL, b"a range")) as (client, url, server):
        for is_stored in (False, True, False):
            ends: list[Any]
            reader, ends = client.open(url, SPAN, is_stored=is_stored), []
            assert isinstance(reader, PeerReader)
            reader.on_end = ends.append
            with reader:
                assert reader.read() == b"a range"
            assert ends == [None]
        (first, second, _), ports = server.seen, {each.client for each in server.seen}
    assert first.path == f"/v2/a/b/blobs/{DIGEST}?ns=registry.example.com%3A5000&size=100"
    assert first.headers["Range"] == "bytes=3-9"
    assert first.headers["Authorization"] == "Bearer token"
    assert first.headers["Aimage-Node"] == ME
    assert "Cache-Control" not in first.headers
    assert second.headers["Cache-Control"] == "only-if-cached"
    assert len(ports) == 1, "a connection is used again"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {}, b"a range"),
        Answer(206, {"Content-Range": "bytes 4-10/100"}, b"a range"),
        Answer(206, PARTIAL, b"a ran"),
        Answer(206, PARTIAL, b"a range and more"),
        Answer(206, PARTIAL | {"Content-Encoding": "gzip"}, b"a range"),
        Answer(401, {"WWW-Authenticate": "Basic"}),
        Answer(500, {}, b"x" * 100_000),
    ],
)
def test_a_response_that_does_not_match_the_span_fails(answer: Answer) -> None:
    with answered(answer) as (client, url, _), pytest.raises(PeerError):
        client.open(url, SPAN)


def test_truncated_content_fails() -> None:
    said = b"HTTP/1.1 206 x\r\nContent-Range: bytes 3-9/100\r\nContent-Length: 7\r\n\r\na ran"
    with answering(said) as url, contextlib.closing(PeerClient(ME, None)) as client:
        reader = client.open(url, SPAN)
        assert isinstance(reader, PeerReader)
        with pytest.raises(PeerError):
            while reader.read(2):
                pass


def test_a_redirect_is_not_followed_but_its_node_ids_are_read() -> None:
    headers = {"Location": "http://169.254.169.254/", "Aimage-Node": f"{OTHER}, 127.0.0.1, x"}
    with answered(Answer(307, headers)) as (client, url, server):
        refusal = client.open(url, SPAN)
        assert isinstance(refusal, PeerRefusal)
        assert (refusal.status, refusal.nodes, refusal.is_busy) == (307, (OTHER,), True)
        assert len(server.seen) == 1


def test_a_closed_keep_alive_connection_is_reopened() -> None:
    with answering(PONG, PONG) as url:  # it closes each connection  # noqa: SIM117
        with contextlib.closing(PeerClient(ME, None, timeouts=SHORT)) as client:
            assert client.ping(url) == client.ping(url) == OTHER


def test_a_closed_client_sends_nothing() -> None:
    with answered(Answer(200, {"Aimage-Node": OTHER})) as (client, url, server):
        client.close()
        with pytest.raises(PeerError):
            client.ping(url)
        assert not server.seen


def test_proxies_and_netrc_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with fleet(tmp_path, 2) as nodes:
        assert all("secret" not in str(headers) for node in nodes for _, headers in node.seen)


def test_tls_is_verified_before_a_token_is_sent(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = ScriptedRegistry(lambda _: Answer(200, {"Aimage-Node": OTHER}))
    server.wrap(context)
    with server.running():
        url = f"https://{server.host}"
        with contextlib.closing(PeerClient(ME, "token")) as client, pytest.raises(PeerError):
            client.ping(url)
        assert not server.seen
        with contextlib.closing(PeerClient(ME, "token", ca_file=tmp_path / "ca.pem")) as client:
            assert client.ping(url) == OTHER
        assert server.seen[0].headers["Authorization"] == "Bearer token"

"""What comes over the wire from other nodes, and what is sent to them."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading

import pytest

from clowder_aimage.registry.peer import PeerClient, Times
from clowder_aimage.registry.peer_response import (
    NONSENSE,
    Busy,
    Got,
    LiarError,
    PeerAddress,
    SilentError,
    content_digest,
    content_digest_header,
)
from tests.node.nodes import fleet
from tests.scripted import Answer, ScriptedRegistry

ME, OTHER = "0" * 32, "1" * 32


@contextlib.contextmanager
def answering(*answers):
    """A server that says these bytes, one per connection, and hangs up; with None it is silent."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run():
            for said in answers:
                with contextlib.suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(65536)
                        if said is None:
                            ended.wait(20)
                        else:
                            connection.sendall(said)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield PeerAddress("127.0.0.1", listening.getsockname()[1])
        ended.set()
    thread.join(10)


def ask(place, client=None):
    client = client or PeerClient(ME, "token", times=Times(life=2, range=2, stall=1))
    with contextlib.closing(client):
        return client.life(place, "/v1/neighbour")


def http(body, head="HTTP/1.1 200 OK\r\n"):
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        http('{"id": "../../etc"}'),
        http('{"id": 7}'),
        http('["id"]'),
        http('{"id": "' + "0" * 32 + '", "id": "' + "1" * 32 + '"}'),
        http("x" * 100_000),
        b"HTTP/1.1 200 OK\r\n" + b"X-Y: z\r\n" * 1000 + b"\r\n",
    ],
)
def test_nonsense_is_told_from_silence(said):
    with answering(said) as place, pytest.raises(LiarError) as caught:
        ask(place)
    assert caught.value.reason == NONSENSE


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", http("", "HTTP/1.1 500 x\r\n")]
)
def test_a_broken_answer_is_silence(said):
    with answering(said) as place, pytest.raises(SilentError):
        ask(place)


def test_one_that_says_nothing_is_given_up():
    with answering(None) as place, pytest.raises(SilentError):
        ask(place)


def test_a_closed_client_lets_go_of_who_waits():
    client = PeerClient(ME, None, times=Times(life=60, range=60, stall=60))
    with answering(None) as place:
        timer = threading.Timer(0.2, client.close)
        timer.start()
        with pytest.raises(SilentError):
            client.life(place, "/v1/neighbour")
        timer.join()
        with pytest.raises(SilentError):
            client.life(place, "/v1/neighbour")


def test_proxies_and_netrc_of_the_environment_have_no_part_in_it(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with fleet(tmp_path, 2) as nodes:
        assert all("secret" not in str(headers) for node in nodes for _, headers in node.seen)


def test_a_content_digest_is_read_as_it_is_written():
    digest = bytes(range(32))
    assert content_digest([content_digest_header(digest)]) == digest
    for wrong in ([], ["", ""], ["sha-256=::"], ["sha-512=:" + "A" * 43 + "=:"], ["md5=:AA==:"]):
        assert content_digest(wrong) is None


def place_of(server, *, is_secure=False):
    host, _, port = server.host.partition(":")
    return PeerAddress(host, int(port), is_secure)


def test_a_connection_serves_again(tmp_path):
    body = b"a range"
    headers = {"Content-Digest": content_digest_header(hashlib.sha256(body).digest())}
    with (
        ScriptedRegistry(lambda _: Answer(200, headers, body)).running() as server,
        contextlib.closing(PeerClient(ME, "token")) as client,
    ):
        for _ in range(3):
            assert isinstance(client.range(place_of(server), "/x", len(body)), Got)
        assert len({seen.client for seen in server.seen}) == 1


def test_a_connection_that_was_kept_for_too_long_is_made_anew():
    said = http('{"id": "' + OTHER + '"}')  # the server hangs up after each
    with (
        answering(said, said) as place,
        contextlib.closing(PeerClient(ME, None, times=Times(life=5))) as client,
    ):
        assert client.life(place, "/") == OTHER
        assert client.life(place, "/") == OTHER


@pytest.mark.parametrize(
    ("body", "holders"),
    [
        (f'{{"code": "busy", "holders": ["{OTHER}"], "digest": "sha256:{"0" * 64}"}}', (OTHER,)),
        (f'{{"code": "busy", "holders": ["{OTHER}"], "digest": "sha256:{"0" * 63}"}}', ()),
        (f'{{"code": "busy", "holders": ["{OTHER}"]}}', ()),
        (f'{{"code": "busy", "holders": {{"{OTHER}": 1}}, "digest": "sha256:{"0" * 64}"}}', ()),
        ('{"code": "busy", "holders": ["http://169.254.169.254"], "come": -1}', ()),
        ('{"code": "busy", "come": true}', ()),
        ('{"code": "busy", "come": 1e400}', None),
    ],
)
def test_of_a_busy_node_only_ids_of_holders_are_believed(body, holders):
    with (
        ScriptedRegistry(lambda _: Answer(503, {}, body.encode())).running() as server,
        contextlib.closing(PeerClient(ME, "token")) as client,
    ):
        answer = client.range(place_of(server), "/x", 10)
    if holders is None:
        assert not isinstance(answer, Busy)
    else:
        assert isinstance(answer, Busy) and answer.holders == holders and answer.come == 0


def test_tls_is_verified_before_a_token_is_sent(tmp_path):
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = ScriptedRegistry(lambda _: Answer(200, {}, f'{{"id": "{OTHER}"}}'.encode()))
    server.wrap(context)
    with server.running():
        with contextlib.closing(PeerClient(ME, "token")) as client, pytest.raises(SilentError):
            client.life(place_of(server, is_secure=True), "/")
        assert not server.seen
        with contextlib.closing(PeerClient(ME, "token", ca_file=tmp_path / "ca.pem")) as client:
            assert client.life(place_of(server, is_secure=True), "/") == OTHER
        assert server.seen[0].headers["Authorization"] == "Bearer token"

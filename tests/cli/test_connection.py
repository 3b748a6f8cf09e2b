"""Options of a connection: credentials, headers, addresses, certificates, and the trace."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from clowder_aimage.config.user_directory import read_client_options
from clowder_aimage.oci import Digest
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving

MANIFEST, BLOBS = artifact(b"{}", b"weights")
DIGEST = str(Digest.of(MANIFEST))
RIGHT = serving(MANIFEST, BLOBS)


def with_basic(seen: Seen) -> Answer:
    if seen.headers.get("Authorization") != "Basic " + base64.b64encode(b"ann:s3cret").decode():
        return Answer(401, {"WWW-Authenticate": 'Basic realm="x"'})
    return RIGHT(seen)


def test_credentials_are_used_and_not_stored(aimage: Callable[[], Aimage], tmp_path: Path) -> None:
    here = aimage()
    with ScriptedRegistry(with_basic).running() as registry:
        name = f"{registry.host}/x:v1"
        here("resolve", name, code=4)
        assert here("resolve", name, "-u", "ann", "-p", "s3cret").line == DIGEST
        options = ("-u", "ann", "--password-stdin")
        assert here("resolve", name, *options, stdin="s3cret\n").line == DIGEST
        assert "valid credentials" in here("resolve", name, "-u", "ann", "-p", "x", code=4).err
    assert not [path for path in tmp_path.rglob("config.json") if b"auths" in path.read_bytes()]


def test_an_error_says_where_credentials_were_looked_for(aimage: Callable[[], Aimage]) -> None:
    """A damaged file is warned of once, also with -q; with --json both are fields of events."""
    here = aimage()
    file = here.home / "docker" / "config.json"
    file.parent.mkdir()
    file.write_text("{")
    here.environment["DOCKER_AUTH_CONFIG"] = "{}"
    with ScriptedRegistry(with_basic).running() as registry:
        name = f"{registry.host}/x:v1"
        plain = here("pull", "-q", name, code=4).err
        *_, step = [line for line in here("resolve", name, "-v", code=4).err.splitlines() if line]
        events = list(map(json.loads, here("resolve", name, "--json", code=4).err.splitlines()))
    damaged = f"{file}: cannot be read: Expecting property name"
    assert plain.count(damaged) == 2
    assert plain.startswith(f"warning: credentials of {registry.host}: {damaged}")
    places = f"none for {registry.host} in DOCKER_AUTH_CONFIG"
    assert f"\n  credentials: {damaged}" in plain and places in plain
    assert step == f"  log in with: aimage login {registry.host}"
    warning, error = events
    assert (warning["level"], warning["place"]) == ("warning", str(file))
    assert (error["event"], places in error["credentials"]) == ("error", True)


def test_each_step_of_the_search_is_a_line_of_the_trace(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    with ScriptedRegistry(with_basic).running() as registry:
        auth = base64.b64encode(b"ann:s3cret").decode()
        config = json.dumps({"auths": {registry.host: {"auth": auth}}})
        here.environment["DOCKER_AUTH_CONFIG"] = config
        done = here("resolve", f"{registry.host}/x:v1", "-v")
    prefix = f"credentials of {registry.host}: DOCKER_AUTH_CONFIG:"
    lines = [line for line in done.err.splitlines() if line.startswith(prefix)]
    assert lines == [f"{prefix} found", f"{prefix} sent to {registry.host}"]
    assert "s3cret" not in done.err and auth not in done.err


@pytest.mark.parametrize(
    "realm", ["LocalHost", "http://localhost:5000/jwt/auth", " a , localhost:1"]
)
def test_a_trusted_realm_is_a_host_or_a_url(realm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMAGE_TRUSTED_REALMS", realm)
    assert "localhost" in read_client_options().trusted_realms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-u", "ann"], "require each other: add --password-stdin"),
        (["-p", "x"], "require each other: add --username"),
        (["-u", "ann", "-p", "x", "--password-stdin"], "--password cannot be combined"),
        (["-H", "nonsense"], "use NAME: VALUE"),
        (["-H", "a b: c"], "use NAME: VALUE"),
        (["-H", "Authorization: x"], "use --username"),
        (["-H", "Host: x"], "use --resolve"),
        (["-H", "Content-Length: 1"], "the header Content-Length cannot be set"),
        (["-H", "X: \u00e9"], "characters other than ASCII"),
        (["--resolve", "h:443"], "use HOST:PORT:ADDRESS"),
        (["--resolve", "h:0:127.0.0.1"], "use HOST:PORT:ADDRESS"),
        (["--key-file", __file__], "--key-file requires --cert-file"),
        (["--cert-file", "absent.pem"], "does not exist"),
        (["--plain-http", "--cert-file", __file__], "--plain-http cannot be combined"),
    ],
)
def test_bad_options_are_usage_errors(
    aimage: Callable[[], Aimage], options: list[str], message: str
) -> None:
    assert message in aimage()("resolve", "localhost:1/x:v1", *options, code=2).err


@pytest.mark.parametrize("option", [["-u", "a", "-p", "b"], ["-H", "X: y"]])
def test_secrets_are_not_sent_to_two_registries(
    aimage: Callable[[], Aimage], option: list[str]
) -> None:
    done = aimage()("copy", "localhost:1/x:v1", "localhost:2/x:v1", *option, code=2)
    assert "is for one registry, and the names are in 2" in done.err


def test_headers_are_sent_to_the_registry_only(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    with ScriptedRegistry(RIGHT).running() as elsewhere:

        def redirecting(seen: Seen) -> Answer:
            if "/blobs/" in seen.path:
                return Answer(307, {"Location": f"http://{elsewhere.host}{seen.path}"})
            return RIGHT(seen)

        with ScriptedRegistry(redirecting).running() as registry:
            here("pull", f"{registry.host}/x:v1", "-H", "X-Team: a team", "-H", "X-Other: 1", "-q")
            assert {one.headers["X-Team"] for one in registry.seen} == {"a team"}
            assert {one.headers["X-Other"] for one in registry.seen} == {"1"}
        assert elsewhere.seen
        assert not any("X-Team" in one.headers for one in elsewhere.seen)


def test_resolve_connects_to_the_address_with_the_name_of_the_host(
    aimage: Callable[[], Aimage], tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("models.example").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    registry = ScriptedRegistry(RIGHT)
    registry.wrap(context)
    with registry.running():
        port = registry.host.rpartition(":")[2]
        host = f"models.example:{port}"
        options = ["--resolve", f"{host}:127.0.0.1", "--ca-file", tmp_path / "ca.pem"]
        assert aimage()("resolve", f"{host}/x:v1", *options).line == DIGEST
        assert {one.headers["Host"] for one in registry.seen} == {host}


def test_a_client_certificate_is_presented(aimage: Callable[[], Aimage], tmp_path: Path) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    clients.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    leaf = clients.issue_cert("client@example.com")
    leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    leaf.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    here, registry = aimage(), ScriptedRegistry(RIGHT)
    registry.wrap(context)
    with registry.running():
        name, ca = f"{registry.host}/x:v1", ["--ca-file", tmp_path / "ca.pem"]
        assert "--cert-file" in here("resolve", name, *ca, code=1).err
        ours = ["--cert-file", tmp_path / "client.pem"]
        assert here("resolve", name, *ca, *ours, "--key-file", tmp_path / "key.pem").line == DIGEST
        assert here("resolve", name, *ca, "--cert-file", tmp_path / "both.pem").line == DIGEST
        assert "cannot load the client certificate" in here("resolve", name, *ca, *ours, code=1).err


def test_a_required_certificate_is_reported_if_the_request_cannot_be_sent(
    aimage: Callable[[], Aimage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry ends the connection with an alert, which may precede the request."""

    def ended(*_: object) -> None:
        raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol")

    monkeypatch.setattr(ssl.SSLSocket, "sendall", ended)
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    registry = ScriptedRegistry(RIGHT)
    registry.wrap(context)
    with registry.running():
        ca = ("--ca-file", tmp_path / "ca.pem")
        assert "--cert-file" in aimage()("resolve", f"{registry.host}/x:v1", *ca, code=1).err


def test_the_trace_has_a_line_for_each_request_without_secrets(
    aimage: Callable[[], Aimage],
) -> None:
    here = aimage()

    def moved(seen: Seen) -> Answer:
        if "/blobs/" in seen.path and "secret" not in seen.path:
            return Answer(
                307, {"Location": f"{seen.path}?token=secret&n=1", "Set-Cookie": "secret"}
            )
        return with_basic(seen) if "/manifests/" in seen.path else serving_path(seen)

    def serving_path(seen: Seen) -> Answer:
        seen.path = seen.path.partition("?")[0]
        return RIGHT(seen)

    with ScriptedRegistry(moved).running() as registry:
        name = f"{registry.host}/x:v1"
        user = ["-u", "ann", "-p", "s3cret", "-H", "X-Key: secret"]
        done = here("pull", name, *user, "-v")
        base = f"http://{registry.host}/v2/x"
        lines = [line for line in done.err.splitlines() if line.startswith(("GET", "HEAD"))]
        assert any(line.startswith(f"GET {base}/manifests/v1 401 ") for line in lines)
        assert any(line.startswith(f"GET {base}/manifests/v1 200 ") for line in lines)
        weights = f"{base}/blobs/{Digest.of(b'weights')}"
        assert any(line.startswith(f"GET {weights}?token=...&n=1 200 ") for line in lines)
        assert all(" ms" in line for line in lines)
        assert len(lines) == len(registry.seen)

        done = here("manifest", "fetch", name, *user, "-vv")
        assert "  > Authorization: Basic ..." in done.err
        assert "  > X-Key: ..." in done.err
        assert "  < Content-Type: application/vnd.oci.image.manifest.v1+json" in done.err

        done = here("pull", name, *user, "-vv", "--json")
        events = [json.loads(line) for line in done.err.splitlines()]
        requests = [one for one in events if one["event"] == "request"]
        assert {one["level"] for one in requests} == {"debug"}
        assert {"method", "url", "status", "seconds", "sent", "received", "headers"} <= set(
            requests[0]
        )
        for text in ("secret", "s3cret", base64.b64encode(b"ann:s3cret").decode()):
            assert text not in done.err + here("pull", name, *user, "-vv").err


def test_the_trace_shows_failures(aimage: Callable[[], Aimage]) -> None:
    done = aimage()("resolve", "127.0.0.1:1/x:v1", "-v", code=1)
    assert "HEAD http://127.0.0.1:1/v2/x/manifests/v1 cannot reach 127.0.0.1:1" in done.err


def test_events_of_blobs_are_shown_with_v_only(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    with ScriptedRegistry(RIGHT).running() as registry:
        name = f"{registry.host}/x:v1"

        def levels(*options: str) -> set[tuple[str, str]]:
            err = here("pull", name, "--json", *options).err
            found = [json.loads(line) for line in err.splitlines()]
            return {(one["event"], one["level"]) for one in found}

        calm = levels()
        assert ("summary", "info") in calm
        assert not [kind for kind, level in calm if level == "debug"]
        assert {("skip", "debug"), ("request", "debug")} <= levels("-v")

"""Bearer tokens: requested scopes, lifetime and sharing between threads."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import logging
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import RegistryError, UnauthorizedError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.auth import _PARAMETER, _Challenge
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.session import Session
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving

BASIC = base64.b64encode(b"operator:pa55word").decode()
NOW = 1_800_000_000.0


class Clock:
    """A clock that is advanced by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Guarded:
    """A registry with a token service; tokens are valid until ``self.revoke()``."""

    def __init__(
        self,
        inner: Any = None,
        *,
        scope: str | None = None,
        realm: Any = None,
        entry: dict[str, str] | None = None,
        **answer: Any,
    ) -> None:
        self.inner = inner or (lambda _: Answer(200))
        self.scope, self.realm, self.answer = scope, realm, answer
        self.entry = {"auth": BASIC} if entry is None else entry
        self.good: set[Any] = set()
        self.count = 0
        self.lock = threading.Lock()
        self.registry = ScriptedRegistry(self.script)

    def script(self, seen: Seen) -> Any:
        if seen.path.startswith("/token"):
            return self.token()
        if seen.headers.get("Authorization", "").removeprefix("Bearer ") in self.good:
            return self.inner(seen)
        realm = self.realm or f"http://{self.registry.host}/token"
        scope = f',scope="{self.scope}"' if self.scope else ""
        return Answer(
            401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="registry"{scope}'}
        )

    def token(self) -> Answer:
        with self.lock:
            self.count += 1
            token = f"t0k3n-{self.count}"
            self.good.add(token)
        body = {"token": token, "access_token": token} | self.answer
        return Answer(200, {}, json.dumps(body).encode())

    def revoke(self) -> None:
        self.good.clear()

    @property
    def asked(self) -> list[Any]:
        return [seen for seen in self.registry.seen if seen.path.startswith("/token")]

    def queries(self) -> list[Any]:
        return [parse_qs(urlsplit(seen.path).query) for seen in self.asked]

    @contextlib.contextmanager
    def session(self, tmp_path: Path, **options: Any) -> Iterator[Session]:
        with self.registry.running():
            self.write(tmp_path)
            connection = ClientOptions(docker_config=tmp_path, **options)
            with Session(Reference(self.registry.host, "team/x"), connection) as session:
                yield session

    def write(self, tmp_path: Path) -> None:
        auths = {self.registry.host: self.entry}
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))


def get(session: Any, path: str = "tags/list", method: str = "GET") -> int:
    response = session.request(method, session.build_url(path))
    response.close()
    return response.status_code


def test_the_default_scope_is_used_when_the_challenge_has_none(tmp_path: Path) -> None:
    guarded = Guarded()
    with guarded.session(tmp_path) as session:
        assert get(session) == get(session, method="HEAD") == 200
        assert get(session, method="POST") == 200
        session.ping()
    assert guarded.queries() == [
        {"service": ["registry"], "scope": ["repository:team/x:pull"]},
        {"service": ["registry"], "scope": ["repository:team/x:pull,push"]},
        {"service": ["registry"]},  # login requests no repository scope
    ]


def test_a_challenge_with_several_scopes_shares_one_token(tmp_path: Path) -> None:
    guarded = Guarded(scope="repository:team/x:pull,push repository:team/y:pull")
    with guarded.session(tmp_path) as session:
        assert get(session) == get(session, method="POST") == 200
    assert guarded.queries() == [
        {
            "service": ["registry"],
            "scope": ["repository:team/x:pull,push", "repository:team/y:pull"],
        }
    ]  # one token per set of scopes, whatever the method


@pytest.mark.parametrize(
    ("answer", "good_for", "not_for"),
    [
        ({}, 47, 49),  # 60 s without expires_in, less a fifth
        ({"expires_in": 300}, 269, 271),  # less 30 s
        ({"expires_in": -5}, 47, 49),
        ({"expires_in": 300, "issued_at": NOW - 100}, 169, 171),
        ({"expires_in": 300, "issued_at": NOW - 5000}, 269, 271),  # a wrong clock
        ({"expires_in": 300, "issued_at": "yesterday"}, 269, 271),
    ],
)
def test_a_token_is_renewed_before_it_expires(
    tmp_path: Path, answer: dict[str, Any], good_for: int, not_for: int
) -> None:
    if isinstance(answer.get("issued_at"), float):
        when = datetime.datetime.fromtimestamp(answer["issued_at"], datetime.UTC)
        answer = answer | {"issued_at": when.isoformat().replace("+00:00", "Z")}
    clock, guarded = Clock(), Guarded(**answer)
    with guarded.session(tmp_path, clock=clock) as session:
        get(session)
        clock.now = NOW + good_for
        get(session)
        assert guarded.count == 1
        clock.now = NOW + not_for
        assert get(session) == 200
    assert guarded.count == 2
    refused = [seen for seen in guarded.registry.seen if "Authorization" not in seen.headers]
    assert len(refused) == 1  # renewed before a 401


def test_a_token_that_expires_during_an_upload_restarts_it(tmp_path: Path) -> None:
    """The token is revoked between POST and PUT: the upload begins again."""
    guarded = Guarded()

    def inner(seen: Any) -> Answer:
        if seen.method == "PUT":
            return Answer(201)
        if guarded.count == 1:
            guarded.revoke()
        return Answer(202, {"Location": "/upload/1"})

    guarded.inner = inner
    with guarded.registry.running():
        guarded.write(tmp_path)
        reference = Reference(guarded.registry.host, "team/x")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            repository.push(Descriptor.of("text/plain", b"abc"), build_bytes_body(b"abc"))
    sent = [seen for seen in guarded.registry.seen if seen not in guarded.asked]
    assert [seen.method for seen in sent] == ["POST", "POST", "PUT", "GET", "POST", "PUT"]
    assert sent[-1].body == b"abc"
    assert [seen.headers.get("Authorization") for seen in sent] == [
        None,
        "Bearer t0k3n-1",
        "Bearer t0k3n-1",
        "Bearer t0k3n-2",
        "Bearer t0k3n-2",
        "Bearer t0k3n-2",
    ]


def test_threads_share_one_exchange(tmp_path: Path) -> None:
    guarded = Guarded()
    with (
        guarded.session(tmp_path, connections_override=16) as session,
        ThreadPoolExecutor(16) as pool,
    ):
        assert set(pool.map(lambda _: get(session), range(64))) == {200}
        assert guarded.count == 1
        guarded.revoke()
        assert set(pool.map(lambda _: get(session), range(64))) == {200}
    assert guarded.count == 2


def test_an_identity_token_is_exchanged_by_post(tmp_path: Path) -> None:
    guarded = Guarded(entry={"identitytoken": "1dent1ty"}, refresh_token="r0tated")
    with guarded.session(tmp_path) as session:
        assert get(session) == 200
        guarded.revoke()
        assert get(session) == 200
    first, second = guarded.asked
    assert first.method == second.method == "POST"
    assert "Authorization" not in first.headers
    assert first.path == "/token"  # no secret in a URL
    assert parse_qs(first.body.decode()) == {
        "grant_type": ["refresh_token"],
        "service": ["registry"],
        "client_id": ["aimage"],
        "scope": ["repository:team/x:pull"],
        "refresh_token": ["1dent1ty"],
    }
    assert parse_qs(second.body.decode())["refresh_token"] == ["r0tated"]


def test_a_registry_token_is_sent_unchanged(tmp_path: Path) -> None:
    """Docker's ``registrytoken``: an access token obtained by another program."""
    guarded = Guarded(entry={"registrytoken": "r3ady"})
    guarded.good.add("r3ady")
    with guarded.session(tmp_path) as session:
        assert get(session) == get(session, method="POST") == 200
        guarded.revoke()
        with pytest.raises(UnauthorizedError, match="was rejected"):
            get(session)
    assert guarded.asked == []  # the token service received no request


def test_a_realm_on_another_host_receives_no_identity_token(tmp_path: Path) -> None:
    """Check every header and body that the other host receives."""
    guarded = Guarded(entry={"identitytoken": "1dent1ty"})
    with ScriptedRegistry(lambda _: guarded.token()).running() as other:
        guarded.realm = f"http://{other.host.replace('127.0.0.1', 'localhost')}/token"
        with guarded.session(tmp_path) as session:
            assert get(session) == 200
        (seen,) = other.seen
        assert seen.method == "GET"
        assert set(seen.headers) <= {
            "Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"
        }  # fmt: skip
        assert b"1dent1ty" not in seen.body
        assert "1dent1ty" not in seen.path


def test_a_busy_token_service_is_retried(tmp_path: Path) -> None:
    guarded = Guarded()
    answers = [Answer(503), Answer(429)]
    right = guarded.token
    guarded.token = lambda: answers.pop() if answers else right()  # type: ignore[method-assign]
    manifest, blobs = artifact(b"{}", b"weights")
    guarded.inner = serving(manifest, blobs)
    with guarded.registry.running():
        guarded.write(tmp_path)
        reference = Reference.parse(f"{guarded.registry.host}/team/x")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            copy(repository, reference, MemoryStore())
    assert len(guarded.asked) == 3


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_by_the_token_service_is_not_retried(tmp_path: Path, status: int) -> None:
    guarded = Guarded()
    guarded.token = lambda: Answer(status)  # type: ignore[method-assign]
    with guarded.session(tmp_path) as session:
        with pytest.raises(UnauthorizedError, match=str(status)) as raised:
            get(session)
        assert raised.value.remedy == ("login" if status == 404 else "logout")
    # A refused password is not sent again.
    assert [seen.headers.get("Authorization") for seen in guarded.asked] == [
        f"Basic {BASIC}",
        *([] if status == 404 else [None]),
    ]


def test_a_redirect_of_the_token_service_is_not_followed(tmp_path: Path) -> None:
    guarded = Guarded()
    with ScriptedRegistry(lambda _: Answer(200)).running() as other:
        guarded.token = lambda: Answer(307, {"Location": f"http://{other.host}/token"})  # type: ignore[method-assign]
        with guarded.session(tmp_path) as session, pytest.raises(UnauthorizedError):
            get(session)
    assert other.seen == []


@pytest.mark.parametrize(
    ("header", "challenge"),
    [
        ('Basic realm="a"', _Challenge("basic", "a")),
        ("basic", _Challenge("basic")),
        (
            'Basic realm="a", Bearer realm="https://b/t",service="s"',
            _Challenge("bearer", "https://b/t", "s"),
        ),
        ('Bearer realm="r",scope="a b" , Basic realm="x"', _Challenge("bearer", "r", None, "a b")),
        ("Bearer realm=https://b/t,service=s", _Challenge("bearer", "https://b/t", "s")),
        ('Bearer realm="a, Basic realm=b"', _Challenge("bearer", "a, Basic realm=b")),
        ('Bearer realm="r",scope="",error="x"', _Challenge("bearer", "r", None, "")),
        ("Negotiate", _Challenge("")),
        ("", _Challenge("")),
        ('"', _Challenge("")),
    ],
)
def test_challenges_are_parsed(header: str, challenge: _Challenge) -> None:
    assert _Challenge.parse(header) == challenge


def test_no_match_of_a_parameter_starts_inside_a_word() -> None:
    """A word without a value was read again from each of its letters: 25 s for 60 kB."""
    assert _PARAMETER.match("ab=c", 0) and not _PARAMETER.match("ab=c", 1)


@pytest.mark.parametrize("entry", [{"auth": BASIC}, {"identitytoken": "pa55word"}])
def test_no_secret_is_logged_at_any_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: dict[str, str]
) -> None:
    """Not the password, the token, or the signature in a CDN's URL."""
    caplog.set_level(logging.DEBUG)
    manifest, blobs = artifact(b"{}", b"weights")
    with ScriptedRegistry(serving(manifest, blobs)).running() as cdn:
        inner = serving(manifest, blobs)

        def redirecting(seen: Any) -> Answer:
            if "/blobs/" in seen.path:
                return Answer(307, {"Location": f"http://{cdn.host}{seen.path}?sig=s1gnature"})
            return inner(seen)

        guarded = Guarded(redirecting, entry=entry)
        cdn_script = cdn.seen
        with guarded.registry.running():
            guarded.write(tmp_path)
            reference = Reference.parse(f"{guarded.registry.host}/team/x")
            with (
                Repository(reference, ClientOptions(docker_config=tmp_path)) as repository,
                contextlib.suppress(RegistryError),  # the script ignores the query
            ):
                repository.resolve(reference)
                for digest, blob in blobs.items():
                    content = Descriptor.of("text/plain", blob)
                    assert str(content.digest) == digest
                    with contextlib.suppress(Exception):
                        repository.open(content).read()
    assert any("s1gnature" in seen.path for seen in cdn_script)
    assert not any("Authorization" in seen.headers for seen in cdn_script)
    assert "/token" in caplog.text  # urllib3 logs requests
    for secret in ("pa55word", BASIC, "t0k3n", "s1gnature"):
        assert secret not in caplog.text
        assert not any(secret in repr(record.__dict__) for record in caplog.records)


@pytest.fixture(params=["port", "scheme"])
def elsewhere(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[ScriptedRegistry, str, Path]]:
    """Return another origin on the same host, by port or by scheme, and its authority."""
    authority = trustme.CA()
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    manifest, blobs = artifact(b"{}", b"weights")
    inner = serving(manifest, blobs)
    other = ScriptedRegistry(lambda seen: inner(seen) if seen.method == "GET" else Answer(201))
    if request.param == "scheme":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        other.wrap(context)
    scheme = "https" if request.param == "scheme" else "http"
    with other.running():
        yield other, f"{scheme}://{other.host}", bundle


def test_another_origin_receives_no_credentials(
    tmp_path: Path, elsewhere: tuple[ScriptedRegistry, str, Path]
) -> None:
    """Check every header: of a redirected blob, and of an upload location."""
    other, there, bundle = elsewhere
    manifest, blobs = artifact(b"{}", b"weights")
    inner = serving(manifest, blobs)

    def script(seen: Any) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": f"{there}/upload/1"})
        if "/blobs/" in seen.path and seen.method == "GET":
            return Answer(307, {"Location": f"{there}{seen.path}"})
        return inner(seen) if seen.method == "GET" else Answer(404)

    guarded = Guarded(script)
    with guarded.registry.running():
        guarded.write(tmp_path)
        reference = Reference.parse(f"{guarded.registry.host}/team/x")
        trusted = frozenset({"127.0.0.1"})
        host = HostSettings(plain_http=True, ca_file=bundle, trusted_hosts=trusted)
        connection = ClientOptions(docker_config=tmp_path, registries={guarded.registry.host: host})
        with Repository(reference, connection) as repository:
            copy(repository, reference, MemoryStore())
            repository.push(Descriptor.of("text/plain", b"abc"), build_bytes_body(b"abc"))
    assert {seen.method for seen in other.seen} >= {"GET", "PUT"}
    usual = {"host", "user-agent", "accept", "accept-encoding", "connection"}
    for seen in other.seen:
        names = {name.lower() for name in seen.headers}
        assert names <= usual | {"range", "content-type", "content-length"}
        assert not any("t0k3n" in value or BASIC in value for value in seen.headers.values())


def test_oras_logging_is_disabled(caplog: pytest.LogCaptureFixture) -> None:
    """Its logger would print the token service's responses."""
    caplog.set_level(logging.DEBUG)
    for name in ("oras", "oras.logger"):
        assert not logging.getLogger(name).isEnabledFor(logging.CRITICAL)


def test_the_exchange_does_not_read_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login operator password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    guarded = Guarded(entry={})
    with guarded.session(tmp_path) as session:
        assert get(session) == 200
    (seen,) = guarded.asked
    assert set(seen.headers) <= {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}

"""Send credentials only to the hosts they belong to."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import (
    AImageError,
    NotFoundError,
    RegistryError,
    StoreError,
    UnauthorizedError,
)
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.credential import logout
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.session import Session
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving

MANIFEST, BLOBS = artifact(b"{}", b"weights")
BASIC = base64.b64encode(b"operator:secret").decode()


def _docker_config(tmp_path: Path, *hosts: str) -> None:
    value = {"auths": {host: {"auth": BASIC} for host in hosts}}
    (tmp_path / "config.json").write_text(json.dumps(value))


def _pull(registry: ScriptedRegistry, tmp_path: Path, **options: Any) -> Descriptor:
    reference = Reference.parse(f"{registry.host}/team/x")
    with Repository(reference, ClientOptions(docker_config=tmp_path, **options)) as repository:
        return copy(repository, reference, MemoryStore())


def _guarded(challenge: Callable[[], str], wanted: str) -> Callable[[Any], Answer]:
    """Return a registry that requires the header ``wanted``."""
    right = serving(MANIFEST, BLOBS)

    def script(seen: Any) -> Answer:
        if seen.headers.get("Authorization") == wanted:
            return right(seen)
        return Answer(401, {"WWW-Authenticate": challenge()})

    return script


def _tokens(seen: Seen) -> Answer:
    return Answer(200, {}, json.dumps({"token": "t0k3n"}).encode())


def _with_realm(realm_of: Callable[[Any], str]) -> ScriptedRegistry:
    """Return a registry whose challenge has this realm, by default its own ``/token``."""
    right = serving(MANIFEST, BLOBS)
    holder: dict[Any, Any] = {}

    def script(seen: Seen) -> Answer:
        if seen.path.startswith("/token"):
            return _tokens(seen)
        if seen.headers.get("Authorization") == "Bearer t0k3n":
            return right(seen)
        realm = realm_of(holder["registry"])
        challenge = f'Bearer realm="{realm}",service="test",scope="repository:team/x:pull"'
        return Answer(401, {"WWW-Authenticate": challenge})

    registry = ScriptedRegistry(script)
    holder["registry"] = registry
    return registry


def test_basic_authentication(tmp_path: Path) -> None:
    script = _guarded(lambda: 'Basic realm="test"', f"Basic {BASIC}")
    with ScriptedRegistry(script).running() as registry:
        with pytest.raises(UnauthorizedError, match="no credentials"):
            _pull(registry, tmp_path)
        _docker_config(tmp_path, registry.host)
        _pull(registry, tmp_path)
        _docker_config(tmp_path, "other.example.com")
        with pytest.raises(UnauthorizedError):
            _pull(registry, tmp_path)


def test_credentials_are_not_sent_before_a_challenge(tmp_path: Path) -> None:
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        _docker_config(tmp_path, registry.host)
        _pull(registry, tmp_path)
    assert not any("Authorization" in seen.headers for seen in registry.seen)


def test_netrc_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login operator password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        _pull(registry, tmp_path)
    assert not any("Authorization" in seen.headers for seen in registry.seen)


def test_a_token_service_on_the_registry_host(tmp_path: Path) -> None:
    with _with_realm(lambda it: f"http://{it.host}/token").running() as registry:
        _docker_config(tmp_path, registry.host)
        _pull(registry, tmp_path)
    asked = [seen for seen in registry.seen if seen.path.startswith("/token")]
    assert len(asked) == 1  # and reused for every later request
    assert asked[0].headers["Authorization"] == f"Basic {BASIC}"
    query = parse_qs(urlsplit(asked[0].path).query)
    assert query == {"service": ["test"], "scope": ["repository:team/x:pull"]}


def test_a_realm_on_another_host_receives_no_credentials(tmp_path: Path) -> None:
    """CVE-2025-51471, CVE-2026-48978: another host is contacted anonymously unless trusted."""
    with ScriptedRegistry(_tokens).running() as other:
        realm = f"http://{other.host.replace('127.0.0.1', 'localhost')}/token"
        with _with_realm(lambda _: realm).running() as registry:
            _docker_config(tmp_path, registry.host)
            _pull(registry, tmp_path)
            assert [seen.headers.get("Authorization") for seen in other.seen] == [None]
            other.seen.clear()
            _pull(registry, tmp_path, trusted_realms=frozenset({"localhost"}))
            assert other.seen[0].headers["Authorization"] == f"Basic {BASIC}"


@pytest.mark.parametrize("realm", ["", "file:///etc/passwd", "token", "//", "gopher://x/"])
def test_an_invalid_realm_url_is_refused(realm: str, tmp_path: Path) -> None:
    with (
        _with_realm(lambda _: realm).running() as registry,
        pytest.raises(UnauthorizedError),
    ):
        _pull(registry, tmp_path)


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no", b'{"token": 7}', b'{"token": "a\\nb"}'])
def test_a_token_response_without_a_token_fails(answer: bytes, tmp_path: Path) -> None:
    def script(seen: Seen) -> Answer:
        if seen.path.startswith("/token"):
            return Answer(200, {}, answer)
        challenge = f'Bearer realm="http://{registry.host}/token",service="x"'
        return Answer(401, {"WWW-Authenticate": challenge})

    registry = ScriptedRegistry(script)
    with registry.running(), pytest.raises(AImageError):
        _pull(registry, tmp_path)


def test_a_huge_token_response_is_not_read_in_full(tmp_path: Path) -> None:
    def script(seen: Seen) -> Answer:
        if seen.path.startswith("/token"):
            return Answer(200, {}, b" " * 5_000_000)
        challenge = f'Bearer realm="http://{registry.host}/token",service="x"'
        return Answer(401, {"WWW-Authenticate": challenge})

    registry = ScriptedRegistry(script)
    with registry.running(), pytest.raises(AImageError, match="exceeds 1048576"):
        _pull(registry, tmp_path)


def test_a_redirect_to_another_origin_drops_credentials(tmp_path: Path) -> None:
    """Another port is another origin. Blobs are often redirected to a CDN like this."""
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as cdn:
        inner = _guarded(lambda: 'Basic realm="test"', f"Basic {BASIC}")

        def script(seen: Seen) -> Any:
            answer = inner(seen)
            if answer.status == 200 and "/blobs/" in seen.path:
                return Answer(307, {"Location": f"http://{cdn.host}{seen.path}"})
            return answer

        with ScriptedRegistry(script).running() as registry:
            _docker_config(tmp_path, registry.host)
            _pull(registry, tmp_path)
    assert cdn.asked("GET")
    assert not any("Authorization" in seen.headers for seen in cdn.seen)


def test_an_upload_location_on_another_host_receives_no_credentials(tmp_path: Path) -> None:
    def taking(seen: Seen) -> Answer:
        return Answer(201)

    with ScriptedRegistry(taking).running() as other:

        def script(seen: Seen) -> Answer:
            if seen.headers.get("Authorization") != f"Basic {BASIC}":
                return Answer(401, {"WWW-Authenticate": 'Basic realm="x"'})
            return Answer(202, {"Location": f"http://{other.host}/upload?state=1"})

        with ScriptedRegistry(script).running() as registry:
            _docker_config(tmp_path, registry.host)
            reference = Reference.parse(f"{registry.host}/x")
            settings = {registry.host: HostSettings(trusted_hosts=frozenset({"127.0.0.1"}))}
            connection = ClientOptions(docker_config=tmp_path, registries=settings)
            with Repository(reference, connection) as repository:
                repository.push(Descriptor.of("text/plain", b"abc"), build_bytes_body(b"abc"))
    (put,) = other.seen
    assert put.body == b"abc"
    assert put.path.startswith("/upload?state=1&digest=sha256%3A")
    assert "Authorization" not in put.headers


@pytest.mark.parametrize(
    "auths",
    [
        lambda host: {host: {"username": "operator", "password": "secret"}},
        lambda host: {f"http://{host}": {"auth": BASIC}},
        lambda host: {f"https://{host}/v1/": {"auth": BASIC}},
        lambda host: {host: {"auth": BASIC}, "odd.example.com": "nonsense"},
    ],
)
def test_auth_keys_that_docker_accepts_are_accepted(
    auths: Callable[[Any], dict[Any, Any]], tmp_path: Path
) -> None:
    script = _guarded(lambda: 'Basic realm="test"', f"Basic {BASIC}")
    with ScriptedRegistry(script).running() as registry:
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths(registry.host)}))
        _pull(registry, tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", '{"auths": []}', '{"credHelpers": 1}', '{"credsStore": {}}']
)
def test_an_invalid_docker_config_is_refused_and_unchanged(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StoreError, match="cannot read"):
        logout("registry.example.com", ClientOptions(docker_config=tmp_path))
    assert (tmp_path / "config.json").read_text() == text


@pytest.mark.parametrize("text", ['{"auths": null}', "{}", '{"credHelpers": null}'])
def test_a_docker_config_without_credentials_is_accepted(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NotFoundError):
        logout("registry.example.com", ClientOptions(docker_config=tmp_path))


def test_a_symlinked_docker_config_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.json"
    real.write_text(json.dumps({"auths": {"registry.example.com": {"auth": BASIC}}, "kept": 1}))
    (tmp_path / "config.json").symlink_to(real)
    logout("registry.example.com", ClientOptions(docker_config=tmp_path))
    assert (tmp_path / "config.json").is_symlink()
    assert json.loads(real.read_text()) == {"auths": {}, "kept": 1}


def test_a_helper_receives_docker_s_server_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker Hub's key differs from its host name."""
    said = tmp_path / "said"
    helper = tmp_path / "docker-credential-test"
    helper.write_text(f"#!/bin/sh\ncat > {said}\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "config.json").write_text('{"credsStore": "test"}')
    logout("docker.io", ClientOptions(docker_config=tmp_path))
    assert said.read_text() == "https://index.docker.io/v1/"


@pytest.mark.parametrize("location", ["http://[::1", "//h:-1/up"])
def test_an_invalid_upload_location_is_refused(location: str, tmp_path: Path) -> None:
    base = "https://a/v2/"
    with (
        Session(
            Reference.parse("a.example.com/x"), ClientOptions(docker_config=tmp_path)
        ) as session,
        pytest.raises(RegistryError, match="invalid URL"),
    ):
        session.join_upload(location, base)

"""Select the auth file of a credential, and the credential of a repository."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import NotFoundError, StoreError
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.credential import login, logout
from clowder_aimage.registry.credential_trace import CredentialTrace
from clowder_aimage.registry.docker_config import (
    DOCKER_HUB_KEY,
    AuthSource,
    Credential,
    find_credential,
    find_helper,
    list_keys,
    list_narrower_keys,
    read_config,
)
from clowder_aimage.registry.session import Session
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen


def basic(user: str, password: str = "secret") -> str:  # noqa: S107
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def config(**users: str) -> dict[Any, Any]:
    return {"auths": {key: {"auth": basic(user)} for key, user in users.items()}}


def user_of(found: Any) -> str | None:
    return base64.b64decode(found.basic).decode().partition(":")[0] if found else None


def find(configs: list[dict[Any, Any]], registry: str, repository: str) -> Credential | None:
    sources = [AuthSource(f"file {number}", known) for number, known in enumerate(configs)]
    trace = CredentialTrace(registry, lambda _: None)
    return find_credential(sources, registry, repository, trace)


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return ``helpers(name, answer)``, which installs a credential helper that logs its input."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def install(name: Any, answer: Any, code: int = 0) -> Path:
        path = tmp_path / f"docker-credential-{name}"
        path.write_text(
            f"#!/bin/sh\ncat >> {tmp_path}/{name}.asked\necho '{answer}'\nexit {code}\n"
        )
        path.chmod(0o755)
        return tmp_path / f"{name}.asked"

    return install


def answer(user: str, secret: str = "secret") -> str:  # noqa: S107
    return json.dumps({"ServerURL": "x", "Username": user, "Secret": secret})


@pytest.mark.parametrize(
    ("repository", "user"),
    [
        ("team/x", "x"),
        ("team/x/deeper", "x"),
        ("team/xy", "team"),
        ("teams", "host"),
    ],
)
def test_the_longest_path_takes_precedence(repository: str, user: str) -> None:
    known = config(
        **{"r.example.com": "host", "r.example.com/team": "team", "r.example.com/team/x": "x"}
    )
    assert user_of(find([known], "r.example.com", repository)) == user


def test_a_path_credential_is_not_used_for_other_paths() -> None:
    known = config(**{"r.example.com/team/x": "x"})
    assert find([known], "r.example.com", "team/y") is None
    assert find([known], "r.example.com", "team") is None
    assert find([known], "r.example.com:5000", "team/x") is None


def test_the_first_file_takes_precedence_over_a_longer_key() -> None:
    first, second = config(**{"r.example.com": "a"}), config(**{"r.example.com/x": "b"})
    assert user_of(find([first, second], "r.example.com", "x")) == "a"
    assert user_of(find([{}, second], "r.example.com", "x")) == "b"


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        (DOCKER_HUB_KEY, "docker.io"),
        ("docker.io", "index.docker.io"),
        ("registry-1.docker.io", "docker.io"),
        ("docker.io/library/x", "registry-1.docker.io"),
        ("https://index.docker.io", "docker.io"),
    ],
)
def test_every_key_of_docker_hub_is_recognised(key: str, registry: str) -> None:
    assert user_of(find([config(**{key: "hub"})], registry, "library/x")) == "hub"


@pytest.mark.parametrize("what", ["access-token", "refresh-token"])
def test_docker_desktop_tokens_are_not_used_as_passwords(what: str) -> None:
    known = config(**{f"{DOCKER_HUB_KEY}{what}": "hub"})
    assert find([known], "docker.io", "library/x") is None


@pytest.mark.parametrize(
    "entry",
    [
        {"auth": base64.b64encode(b"<token>:t0k").decode()},
        {"auth": basic("<token>", "old"), "identitytoken": "t0k"},
        {"username": "<token>", "password": "t0k"},
    ],
)
def test_identity_tokens_are_read(entry: dict[str, Any]) -> None:
    found = find([{"auths": {"r.example.com": entry}}], "r.example.com", "x")
    assert found == Credential(identity_token="t0k")
    assert "t0k" not in repr(found)


@pytest.mark.parametrize("auth", ["", "?", base64.b64encode(b"x").decode(), 7])
def test_an_invalid_auth_entry_is_ignored(auth: str | int) -> None:
    known = {"auths": {"r.example.com": {"auth": auth}}}
    assert find([known], "r.example.com", "x") is None


def test_a_host_helper_precedes_the_entry_and_the_global_helper(
    helpers: Callable[..., Path],
) -> None:
    own, every = helpers("own", answer("own")), helpers("every", answer("every"))
    known = config(**{"r.example.com": "inline", "r.example.com/path": "path"})
    known |= {"credHelpers": {"r.example.com": "own"}, "credsStore": "every"}
    assert user_of(find([known], "r.example.com", "path/x")) == "path"
    assert not own.exists()
    assert user_of(find([known], "r.example.com", "x")) == "own"
    assert own.read_text() == "r.example.com"
    del known["credHelpers"]
    assert user_of(find([known], "r.example.com", "x")) == "inline"
    assert not every.exists()
    assert user_of(find([known], "other.example.com", "x")) == "every"


def test_a_helper_returns_an_identity_token(helpers: Callable[..., Path]) -> None:
    helpers("own", answer("<token>", "t0k"))
    known = {"credHelpers": {"r.example.com": "own"}}
    found = find([known], "r.example.com", "x")
    assert found == Credential(identity_token="t0k")


@pytest.mark.parametrize(("said", "code"), [("no", 0), ("[]", 0), ("not found", 1)])
def test_a_helper_without_a_credential_is_ignored(
    helpers: Callable[..., Path], said: str, code: int
) -> None:
    helpers("own", said, code)
    known = config(**{"r.example.com": "inline"}) | {"credHelpers": {"r.example.com": "own"}}
    assert user_of(find([known], "r.example.com", "x")) == "inline"


def test_a_helper_is_run_from_path_only(helpers: Callable[..., Path], tmp_path: Path) -> None:
    asked = helpers("own", answer("own"))
    known = {"credsStore": f"x/../../{tmp_path}/docker-credential-own"}
    assert find([known], "r.example.com", "x") is None
    assert not asked.exists()


def test_a_docker_hub_helper_configured_by_containers_is_used(helpers: Callable[..., Path]) -> None:
    asked = helpers("own", answer("own"))
    known = {"credHelpers": {"docker.io": "own"}}
    assert find_helper(known, "docker.io") == "own"
    assert user_of(find([known], "docker.io", "x")) == "own"
    assert asked.read_text() == DOCKER_HUB_KEY


def files(tmp_path: Path, **options: Any) -> tuple[Path, ClientOptions]:
    first = tmp_path / "first" / "auth.json"
    return first, ClientOptions(
        docker_config=tmp_path / "docker",
        auth_file=first,
        container_auth=(tmp_path / "run.json", tmp_path / "home.json"),
        **options,
    )


def test_auth_files_are_searched_in_order(tmp_path: Path) -> None:
    first, connection = files(tmp_path)
    found: tuple[Path, ...] = connection.auth_files
    assert found == (
        first,
        tmp_path / "docker" / "config.json",
        tmp_path / "run.json",
        tmp_path / "home.json",
    )
    assert ClientOptions(docker_config=tmp_path).auth_files == (tmp_path / "config.json",)


def _accepting(seen: Seen) -> Answer:
    if seen.headers.get("Authorization") != f"Basic {basic('operator')}":
        return Answer(401, {"WWW-Authenticate": 'Basic realm="x"'})
    return Answer(200)


def test_login_and_logout_use_the_named_file(tmp_path: Path) -> None:
    first, connection = files(tmp_path)
    with ScriptedRegistry(_accepting).running() as registry:
        assert login(registry.host, "operator", "secret", connection) == str(first)
    assert first.stat().st_mode & 0o777 == 0o600
    assert json.loads(first.read_text()) == config(**{registry.host: "operator"})
    assert not (tmp_path / "docker").exists()
    logout(registry.host, connection)
    assert json.loads(first.read_text()) == {"auths": {}}
    with pytest.raises(NotFoundError):
        logout(registry.host, connection)


def test_logout_removes_every_spelling_of_a_host() -> None:
    known = config(**{DOCKER_HUB_KEY: "a", "docker.io": "b", "docker.io/team": "c"})
    assert list_keys(known, "docker.io") == [DOCKER_HUB_KEY, "docker.io", "docker.io/team"]
    assert list_narrower_keys(known, "docker.io") == ["docker.io/team"]


@pytest.mark.parametrize("name", ["run.json", "home.json"])
def test_the_error_for_a_broken_file_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"auths": []}')
    with pytest.raises(StoreError, match=name):
        read_config(tmp_path / name)


def test_a_helper_runs_only_after_a_challenge(tmp_path: Path, helpers: Callable[..., Path]) -> None:
    asked = helpers("own", answer("operator"))
    (tmp_path / "config.json").write_text(json.dumps({"credsStore": "own"}))
    connection = ClientOptions(docker_config=tmp_path)
    with ScriptedRegistry(lambda _: Answer(200)).running() as open_to_all:
        with Session(Reference(open_to_all.host, "x"), connection) as session:
            session.ping()
        assert not asked.exists()
    with (
        ScriptedRegistry(_accepting).running() as registry,
        Session(Reference(registry.host, "x"), connection) as session,
    ):
        session.ping()
        session.ping()
    assert asked.read_text() == registry.host


def test_amazon_ecr_basic_credentials(tmp_path: Path, helpers: Callable[..., Path]) -> None:
    """Basic authentication without a token service: user AWS, password of two kilobytes."""
    secret = base64.b64encode(bytes(range(256)) * 6).decode()
    asked = helpers("ecr-login", answer("AWS", secret))
    expected = f"Basic {basic('AWS', secret)}"

    def script(seen: Seen) -> Answer:
        if seen.headers.get("Authorization") == expected:
            return Answer(200)
        challenge = 'Basic realm="https://ecr.example.com/",service="ecr.amazonaws.com"'
        return Answer(401, {"WWW-Authenticate": challenge})

    with ScriptedRegistry(script).running() as registry:
        known = {"credHelpers": {registry.host: "ecr-login"}, "credsStore": "absent"}
        (tmp_path / "config.json").write_text(json.dumps(known))
        reference = Reference(registry.host, "team/x")
        with Session(reference, ClientOptions(docker_config=tmp_path)) as session:
            for method in ("GET", "POST", "GET"):
                response = session.request(method, session.build_url("tags/list"))
                response.close()
                assert response.status_code == 200
        assert asked.read_text() == registry.host  # once
        assert [seen.headers.get("Authorization") for seen in registry.seen] == [
            None, expected, None, expected, expected,
        ]  # fmt: skip


@pytest.mark.parametrize("token", ["", 7, "two words", "ünicode"])
def test_an_invalid_registry_token_is_ignored(token: str | int) -> None:
    """A token that is invalid in a header is skipped, and the next credential is used."""
    entry = {"registrytoken": token, "auth": basic("user")}
    known = {"auths": {"r.example.com": entry}}
    assert user_of(find([known], "r.example.com", "x")) == "user"


def test_a_registry_token_takes_precedence_and_is_not_logged() -> None:
    entry = {"registrytoken": "r3ady", "auth": basic("user"), "identitytoken": "1dent1ty"}
    found = find([{"auths": {"r.example.com": entry}}], "r.example.com", "x")
    assert found == Credential(registry_token="r3ady")
    assert "r3ady" not in repr(found)


@pytest.mark.integration
def test_the_command_line_reads_the_default_auth_files(
    aimage: Callable[..., Aimage], private_registry: RealRegistry, tiny: Path
) -> None:
    """podman's file with a path, and REGISTRY_AUTH_FILE, precede docker's wrong credentials."""
    here, host = aimage(), private_registry.host
    right = {"auth": basic("operator", "open sesame")}
    here("create", f"{host}/places/x:v1", tiny, "--whole-files")
    podman = here.home / ".config" / "containers" / "auth.json"
    podman.parent.mkdir(parents=True)
    podman.write_text(json.dumps({"auths": {f"{host}/other": right}}))
    here("push", f"{host}/places/x:v1", code=4)
    podman.write_text(json.dumps({"auths": {f"{host}/places": right}}))
    here("push", f"{host}/places/x:v1")
    docker = here.home / "docker" / "config.json"
    docker.parent.mkdir()
    docker.write_text(json.dumps(config(**{host: "stranger"})))
    here("push", f"{host}/places/x:v1", code=4)
    here.environment["REGISTRY_AUTH_FILE"] = str(here.home / "named.json")
    here("login", host, "-u", "operator", "--password-stdin", stdin="open sesame\n")
    assert json.loads((here.home / "named.json").read_text()) == {"auths": {host: right}}
    here("push", f"{host}/places/x:v1")
    here("logout", host)
    here("push", f"{host}/places/x:v1", code=4)

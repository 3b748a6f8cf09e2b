"""Replay Harbor's behaviour from its documentation.

Robot accounts are called ``robot$name`` or ``robot$project+name``; a project must exist before
anything is pushed to it; tokens of its token service live 30 minutes by default; a proxy-cache
project can be pulled from and not pushed to; quotas, immutable tags and the vulnerability policy
refuse with 403 and 412 (goharbor.io: "Create Robot Accounts", "Configure Proxy Cache", "Configure
Project Quotas", "Create Tag Immutability Rules", "Configure Content Trust").
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    ManifestRefusedError,
    NotFoundError,
    RegistryError,
    UnauthorizedError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.credential import login
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry, artifact, skip_waiting

ROBOT = "robot$team+node-7"
SECRET = "p4$$:word"
BASIC = base64.b64encode(f"{ROBOT}:{SECRET}".encode()).decode()
MANIFEST, _ = artifact(b"{}", b"weights")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waiting(monkeypatch)


def says(status: int, code: str, message: str) -> Answer:
    """Return an error response in the form of Harbor's core."""
    return Answer(status, {}, json.dumps({"errors": [{"code": code, "message": message}]}).encode())


class Harbor:
    """Token service and registry on one host, as in Harbor."""

    def __init__(self, inner: Any, life: int = 1800) -> None:
        self.inner = inner
        self.life = life
        self.now = 1_800_000_000.0
        self.tokens: dict[Any, Any] = {}  # token -> expiry time
        self.asked: list[Any] = []
        self.before = lambda seen: None
        self.registry = ScriptedRegistry(self.script)

    @property
    def host(self) -> str:
        return self.registry.host

    def script(self, seen: Any) -> Any:
        self.before(seen)
        if seen.path.startswith("/service/token"):
            self.asked.append(seen)
            if seen.headers.get("Authorization", f"Basic {BASIC}") != f"Basic {BASIC}":
                return says(401, "UNAUTHORIZED", "unauthorized")
            token = f"t0ken{len(self.asked)}"
            self.tokens[token] = self.now + self.life
            body = {"token": token, "access_token": "", "expires_in": self.life}
            return Answer(200, {}, json.dumps(body).encode())
        token = seen.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.tokens.get(token, 0) <= self.now:
            realm = f"http://{self.host}/service/token"
            challenge = (
                f'Bearer realm="{realm}",service="harbor-registry",'
                'scope="repository:team/x:pull,push"'
            )
            return Answer(401, {"Www-Authenticate": challenge})
        return self.inner(seen)

    def connection(self, tmp_path: Path, entry: dict[Any, Any] | None = None) -> ClientOptions:
        auths = {self.host: entry or {"auth": BASIC}}
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
        return ClientOptions(docker_config=tmp_path, clock=lambda: self.now)

    def repository(self, tmp_path: Path) -> Repository:
        return Repository(Reference.parse(f"{self.host}/team/x"), self.connection(tmp_path))


def refusing(method: str, answer: Answer | None) -> Callable[[Any], Answer | None]:
    """Return a registry that accepts uploads but refuses one kind of request."""

    def inner(seen: Any) -> Answer | None:
        if seen.method == method:
            return answer
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload/1"})
        return Answer(404 if seen.method == "HEAD" else 201)

    return inner


def push(harbor: Harbor, tmp_path: Path, data: bytes = b"weights") -> None:
    with harbor.registry.running(), harbor.repository(tmp_path) as repository:
        repository.push(Descriptor.of("application/x", data), build_bytes_body(data))


def put_manifest(harbor: Harbor, tmp_path: Path) -> None:
    with harbor.registry.running(), harbor.repository(tmp_path) as repository:
        reference = Reference.parse(f"{harbor.host}/team/x:v1")
        descriptor = Descriptor.of(mediatype.OCI_MANIFEST, MANIFEST)
        repository.push(descriptor, build_bytes_body(MANIFEST), reference)


def test_a_robot_name_and_secret_are_sent_unchanged(tmp_path: Path) -> None:
    harbor = Harbor(refusing("", None))
    push(harbor, tmp_path)
    (asked,) = harbor.asked
    sent = base64.b64decode(asked.headers["Authorization"].removeprefix("Basic ")).decode()
    assert sent == f"{ROBOT}:{SECRET}"
    assert "service=harbor-registry" in asked.path
    assert parse_qs(urlsplit(asked.path).query)["scope"] == ["repository:team/x:pull,push"]


def test_login_with_a_robot_account(tmp_path: Path) -> None:
    harbor = Harbor(lambda seen: Answer(200))
    with harbor.registry.running():
        login(harbor.host, ROBOT, SECRET, ClientOptions(docker_config=tmp_path))
    kept = json.loads((tmp_path / "config.json").read_text())["auths"][harbor.host]["auth"]
    assert base64.b64decode(kept).decode() == f"{ROBOT}:{SECRET}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (says(404, "NOT_FOUND", "project team not found"), NotFoundError),
        (says(401, "UNAUTHORIZED", "project team not found: unauthorized"), UnauthorizedError),
        (says(403, "FORBIDDEN", "project team not found"), UnauthorizedError),
    ],
)
def test_push_to_a_missing_project_fails(
    answer: Answer, error: type[AccessError], tmp_path: Path
) -> None:
    harbor = Harbor(refusing("POST", answer))
    with pytest.raises(error, match="project team not found") as caught:
        push(harbor, tmp_path)
    assert "create the project" in (caught.value.hint or "")


def test_a_token_is_renewed_during_a_long_push(tmp_path: Path) -> None:
    """Forty blobs of a minute each: the second token is requested before the first expires."""
    harbor = Harbor(refusing("", None))

    def inner(seen: Any) -> Any:
        if seen.method == "PUT":
            harbor.now += 60
        return refusing("", None)(seen)

    harbor.inner = inner
    with harbor.registry.running(), harbor.repository(tmp_path) as repository:
        for i in range(40):
            data = str(i).encode()
            repository.push(Descriptor.of("application/x", data), build_bytes_body(data))
    assert len(harbor.asked) == 2
    refused = [s for s in harbor.registry.seen if "Authorization" not in s.headers]
    assert len(refused) == 1  # the first request


def test_a_token_that_expires_during_an_upload_is_renewed(tmp_path: Path) -> None:
    """The upload outlasts the token, its last request is refused, and the blob is sent again."""
    harbor = Harbor(refusing("", None))
    slow = [1]

    def before(seen: Any) -> None:
        if seen.method == "PUT" and slow:
            slow.clear()
            harbor.now += 3600  # the time that the body took

    harbor.before = before
    push(harbor, tmp_path)
    puts = [seen for seen in harbor.registry.seen if seen.method == "PUT"]
    assert [seen.body for seen in puts] == [b"weights", b"weights"]
    assert len(harbor.asked) == 2


def test_push_to_a_proxy_cache_fails(tmp_path: Path) -> None:
    said = "can not push artifact to a proxy project: team"
    harbor = Harbor(refusing("POST", says(405, "METHOD NOT ALLOWED", said)))
    with pytest.raises(RegistryError, match="can not push artifact to a proxy project"):
        push(harbor, tmp_path)


@pytest.mark.parametrize("code", ["METHOD NOT ALLOWED", "METHODNOTALLOWED", "UNSUPPORTED"])
def test_a_proxy_cache_error_does_not_try_other_dialects(code: str, tmp_path: Path) -> None:
    said = "can not push artifact to a proxy project: team"
    harbor = Harbor(refusing("PUT", says(405, code, said)))
    with pytest.raises(AImageError, match="proxy project") as caught:
        put_manifest(harbor, tmp_path)
    assert not isinstance(caught.value, ManifestRefusedError)


@pytest.mark.parametrize(
    ("answer", "words", "hint"),
    [
        (
            says(403, "DENIED", "adding 2.0 GiB of storage resource, which when updated to current "
                 "usage of 9.0 GiB will exceed the configured upper limit of 10.0 GiB."),
            "upper limit of 10.0 GiB",
            "quota",
        ),
        (
            says(412, "PRECONDITION", "configured as immutable, cannot be updated"),
            "configured as immutable",
            "another tag",
        ),
    ],
)  # fmt: skip
def test_a_policy_error_includes_harbor_s_message(
    answer: Answer, words: str, hint: str, tmp_path: Path
) -> None:
    harbor = Harbor(refusing("PUT", answer))
    with pytest.raises(AImageError, match=words) as caught:
        put_manifest(harbor, tmp_path)
    assert hint in (caught.value.hint or "")
    assert not isinstance(caught.value, ManifestRefusedError)


def test_a_pull_refused_by_the_vulnerability_policy_fails(tmp_path: Path) -> None:
    said = "current image with 3 vulnerabilities cannot be pulled due to configured policy"
    harbor = Harbor(lambda _: says(412, "PROJECTPOLICYVIOLATION", said))
    with (
        harbor.registry.running(),
        harbor.repository(tmp_path) as repository,
        pytest.raises(RegistryError, match="cannot be pulled due to configured policy"),
    ):
        repository.resolve(Reference.parse(f"{harbor.host}/team/x:v1"))


def test_pull_through_a_proxy_cache(tmp_path: Path) -> None:
    """A blob that is not cached yet is fetched upstream, so the response is slow."""
    kind = {"Content-Type": mediatype.OCI_MANIFEST}
    harbor = Harbor(lambda _: Answer(200, kind, MANIFEST))
    with harbor.registry.running(), harbor.repository(tmp_path) as repository:
        found = repository.resolve(Reference.parse(f"{harbor.host}/team/x:v1"))
    assert found.size == len(MANIFEST)


# -- the command line


class Strict(Harbor):
    """Reissues no token to an unknown robot, and challenges with Basic on an invalid token."""

    def script(self, seen: Any) -> Any:
        header = seen.headers.get("Authorization", "")
        known = header == f"Basic {BASIC}" or b"refresh_token=1dent1ty" in seen.body
        if seen.path.startswith("/service/token") and not known:
            return says(401, "UNAUTHORIZED", "unauthorized")
        if not seen.path.startswith("/service/token") and known:
            return self.inner(seen)
        answer = super().script(seen)
        if answer.status == 401 and header and answer.headers:
            return Answer(401, {"Www-Authenticate": 'Basic realm="harbor"'})
        return answer


@pytest.fixture
def packed(aimage: Callable[..., Aimage]) -> Callable[[Any], Aimage]:
    """Return ``packed(host)``: the command line with a small AImage tagged for that host."""

    def make(host: Any) -> Aimage:
        here = aimage()
        layout = ImageLayout(here.store)
        layer = Layer(Descriptor.of(mediatype.AIMAGE_FILE, b"{}"), "model_index.json")
        aimage_there = AImage(b'{"schemaVersion":1,"components":{}}', (layer,))
        manifest, config = DIALECTS["clowder"].write(aimage_there)
        layout.push(layer.descriptor, build_bytes_body(b"{}"))
        layout.push(manifest.config, build_bytes_body(config))
        reference = Reference.parse(f"{host}/team/x:v1")
        layout.push(manifest.descriptor, build_bytes_body(manifest.raw), reference)
        return here

    return make


def taking(seen: Any) -> Answer:
    """Accept every upload and serve one-byte blobs."""
    if seen.method == "POST":
        return Answer(202, {"Location": "/upload/1"})
    if seen.method == "HEAD":
        return Answer(200, {"Content-Length": "1"})
    return Answer(200 if seen.method == "GET" else 201)


def helper(here: Any) -> dict[Any, Any]:
    """Return the environment of a credential helper that keeps one entry in a file."""
    programs = here.home / "programs"
    programs.mkdir()
    kept = here.home / "kept.json"
    program = programs / "docker-credential-file"
    program.write_text(
        f"#!/bin/sh\ncase $1 in store) cat > {kept};; get) cat > /dev/null; cat {kept};; esac\n"
    )
    program.chmod(0o755)
    (here.home / "docker").mkdir()
    (here.home / "docker" / "config.json").write_text('{"credsStore": "file"}')
    return {"PATH": f"{programs}:/usr/bin:/bin"}


@pytest.mark.parametrize("place", ["docker", "REGISTRY_AUTH_FILE", "helper"])
def test_login_and_push_with_a_robot_account(place: str, packed: Any) -> None:
    """The name and secret pass unchanged through stdin, a file or a helper, and two headers."""
    harbor = Strict(taking)
    with harbor.registry.running():
        here = packed(harbor.host)
        if place == "REGISTRY_AUTH_FILE":
            here.environment[place] = str(here.home / "auth.json")
        if place == "helper":
            here.environment |= helper(here)
        name = f"{harbor.host}/team/x:v1"
        here("push", name, code=4)
        login = ("login", harbor.host, "--username", ROBOT, "--password-stdin")
        here(*login, code=4, stdin="wrong\n")
        here(*login, stdin=f"{SECRET}\n")
        here("push", name)
    query = parse_qs(urlsplit(harbor.asked[-1].path).query)
    assert query["service"] == ["harbor-registry"]
    assert query["scope"][0].startswith("repository:team/x:")


@pytest.mark.parametrize(
    ("answer", "code", "hint"),
    [
        (says(404, "NOT_FOUND", "project team not found"), 3, "create the project"),
        (says(401, "UNAUTHORIZED", "project team not found"), 4, "create the project"),
        (says(403, "FORBIDDEN", "project team not found"), 4, "create the project"),
        (says(403, "DENIED", "requested access to the resource is denied"), 4, "lack permission"),
        (says(403, "DENIED", "can not push artifact to a proxy project: team"), 1,
         "another project"),
        (says(405, "METHOD_NOT_ALLOWED", "can not push artifact to a proxy project: team"), 1,
         "another project"),
        (says(405, "UNSUPPORTED", "can not push artifact to a proxy project: team"), 1,
         "another project"),
        (says(403, "DENIED", "adding 1.2 MiB of storage resource, which when updated to current "
              "usage of 9.0 GiB will exceed the configured upper limit of 9.0 GiB."), 1, "quota"),
        (says(403, "DENIED", "The system is in read only mode. Any modification is prohibited."), 1,
         "read-only mode"),
        (says(412, "PRECONDITION", "Failed to process request due to 'x:v1' configured as "
              "immutable."), 1, "another tag"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "PUT manifest"])
def test_a_refused_push_tries_no_other_dialect(
    method: str, answer: Answer, code: int, hint: str, packed: Any
) -> None:
    """The error has Harbor's message, and no other dialect is tried."""

    def inner(seen: Any) -> Answer:
        is_it = seen.method == "POST" if method == "POST" else "/manifests/" in seen.path
        return answer if is_it else taking(seen)

    harbor = Strict(inner)
    with harbor.registry.running():
        here = packed(harbor.host)
        here.environment["DOCKER_CONFIG"] = str(here.home)
        harbor.connection(here.home)
        done = here("push", f"{harbor.host}/team/x:v1", code=code)
    message = json.loads(answer.body)["errors"][0]["message"]
    assert message in done.err
    assert hint in done.err
    assert "dialect" not in done.err
    puts = [path for path in harbor.registry.asked("PUT") if "/manifests/" in path]
    assert len(puts) == (0 if method == "POST" else 1)


def test_the_command_reports_a_pull_refused_by_policy(aimage: Callable[..., Aimage]) -> None:
    said = "current image without vulnerability scanning cannot be pulled due to configured policy"
    harbor = Strict(lambda _: says(412, "PROJECTPOLICYVIOLATION", said))
    with harbor.registry.running():
        here = aimage()
        here.environment["DOCKER_CONFIG"] = str(here.home)
        harbor.connection(here.home)
        done = here("pull", f"{harbor.host}/team/x:v1", code=1)
    assert said in done.err
    assert "policy of the project" in done.err


@pytest.mark.parametrize("entry", [{"auth": BASIC}, {"identitytoken": "1dent1ty"}])
def test_requests_continue_after_a_token_is_discarded(
    entry: dict[str, str], tmp_path: Path
) -> None:
    """Harbor answers an invalid token with a ``Basic`` challenge, whatever the first one was."""
    harbor = Strict(taking)
    connection = harbor.connection(tmp_path, entry)
    reference = Reference.parse(f"{harbor.host}/team/x")
    with harbor.registry.running(), Repository(reference, connection) as repository:
        for data in (b"1", b"2", b"3"):
            assert repository.exists(Descriptor.of("text/plain", data))
            harbor.tokens.clear()
    assert len(harbor.asked) == (1 if "auth" in entry else 3)


def test_an_expired_registry_token_fails(tmp_path: Path) -> None:
    harbor = Strict(taking)
    connection = harbor.connection(tmp_path, {"registrytoken": "r3ady"})
    harbor.tokens["r3ady"] = harbor.now + 60
    reference = Reference.parse(f"{harbor.host}/team/x")
    with harbor.registry.running(), Repository(reference, connection) as repository:
        assert repository.exists(Descriptor.of("text/plain", b"1"))
        harbor.now += 61
        with pytest.raises(UnauthorizedError, match="was rejected"):
            repository.exists(Descriptor.of("text/plain", b"2"))
    assert harbor.asked == []

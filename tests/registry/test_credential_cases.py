"""Situations in which credentials exist: they are used, or the error says why they were not."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.cli.verbs.login import _parse_host
from clowder_aimage.errors import AccessError, NotFoundError, UnauthorizedError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.credential import login, logout
from clowder_aimage.registry.credential_trace import CredentialEvent, CredentialTrace
from clowder_aimage.registry.docker_config import (
    AuthSource,
    Credential,
    encode_basic,
    find_credential,
)
from clowder_aimage.registry.session import Session
from tests.scripted import (
    Answer,
    Script,
    ScriptedRegistry,
    Seen,
    artifact,
    serving,
    skip_waiting,
)

MANIFEST, BLOBS = artifact(b"{}", b"weights")
PASSWORD = "pa55word"
BASIC = base64.b64encode(f"operator:{PASSWORD}".encode()).decode()
LONG = base64.b64encode(f"AWS:{'p' * 120}~?".encode()).decode()
HOST = "HOST"  # in texts: the registry's


def _wrap(text: str, end: str = "\n") -> str:
    return end.join(text[start : start + 76] for start in range(0, len(text), 76))


def _entry(**fields: str) -> str:
    return json.dumps({"auths": {HOST: fields}})


STORED = _entry(auth=BASIC)


@dataclass
class Guard:
    """A registry: its answers without credentials, and with refused ones.

    ``first`` is the status of a repository without credentials, and ``root`` that of /v2/, both
    with a challenge if it is 401. The token service, if there is one, is at ``realm``; it refuses
    anonymous requests with ``anonymous`` and others with ``refusal``.
    """

    first: int = 401
    root: int = 401
    right: str = BASIC
    is_bearer: bool = False
    realm: str = f"http://{HOST}/token"
    anonymous: int = 401
    refusal: int = 401
    anyone: int = 401  # the answer to a token for no one
    bare: bool = False  # a 401 of a repository has no challenge
    mute: bool = False  # no answer has a challenge
    eager: bool = False  # a refusal with any status has a challenge
    denied: bool = False  # the account lacks the permission
    registry: ScriptedRegistry = field(init=False)

    def __post_init__(self) -> None:
        self.registry = ScriptedRegistry(self.script)

    def script(self, seen: Seen) -> Answer:
        sent = seen.headers.get("Authorization", "")
        if seen.path.startswith("/token"):
            return self._issue(sent)
        if sent == ("Bearer t0k3n" if self.is_bearer else f"Basic {self.right}"):
            if self.denied and seen.path != "/v2/":
                return self._refuse(401, seen)
            return Answer(200) if seen.path == "/v2/" else self._serve(seen)
        if sent == "Bearer any0ne":
            return self._refuse(self.anyone, seen)
        if sent:
            return self._refuse(401, seen)
        return self._refuse(self.root if seen.path == "/v2/" else self.first, seen)

    def _issue(self, sent: str) -> Answer:
        if sent == f"Basic {self.right}":
            return Answer(200, {}, b'{"token": "t0k3n"}')
        status = self.refusal if sent else self.anonymous
        return Answer(status, {}, b'{"token": "any0ne"}' if status == 200 else b"")

    def _refuse(self, status: int, seen: Seen) -> Answer:
        if status == 200:
            return Answer(200) if seen.path == "/v2/" else self._serve(seen)
        realm = self.realm.replace(HOST, self.registry.host)
        # As ghcr.io, whose /v2/ names the scope of an example.
        scope = "repository:user/image:pull" if seen.path == "/v2/" else ""
        challenge = f'Bearer realm="{realm}",scope="{scope}"' if self.is_bearer else "Basic realm=x"
        if self.denied and "Authorization" in seen.headers:
            challenge += ',error="insufficient_scope"'
        has_challenge = status == 401 and not (self.bare and seen.path != "/v2/")
        has_challenge = (has_challenge or self.eager) and not self.mute
        return Answer(status, {"WWW-Authenticate": challenge} if has_challenge else {})

    def _serve(self, seen: Seen) -> Answer:
        script: Script = serving(MANIFEST, BLOBS)
        return script(seen)


OPEN = Guard(first=200, root=200)
FOREIGN = Guard(is_bearer=True, realm=f"http://localhost:1/token?{HOST}")


def _bearer(**fields: Any) -> Guard:
    return Guard(is_bearer=True, **fields)


# name: registry, files and options, the statuses of the result, texts of the warnings
PULLS: dict[str, tuple[Guard, dict[str, Any], type[AccessError] | None, tuple[str, ...]]] = {
    "401": (Guard(), {"docker": STORED}, None, ()),
    "404 for anonymous": (Guard(404), {"docker": STORED}, None, ()),
    "403 for anonymous": (Guard(403), {"docker": STORED}, None, ()),
    "404 for anonymous, token": (_bearer(first=404), {"docker": STORED}, None, ()),
    "404 for anonymous, given": (Guard(404), {"basic_auth": BASIC}, None, ()),
    "404 for anonymous, /v2/ open": (Guard(404, 200), {"docker": STORED}, NotFoundError, ()),
    "404, wrong password": (Guard(404, right="x"), {"docker": STORED}, NotFoundError, ()),
    "401 without a challenge": (Guard(401, bare=True), {"docker": STORED}, None, ()),
    "401, never a challenge": (Guard(mute=True), {"docker": STORED}, None, ()),
    "401, never a challenge, given": (Guard(mute=True), {"basic_auth": BASIC}, None, ()),
    "401 without a challenge, /v2/ open": (
        Guard(401, 200, bare=True),
        {"docker": STORED},
        None,
        (),
    ),
    "401, never a challenge, wrong password": (
        Guard(mute=True, right="x"),
        {"docker": STORED},
        UnauthorizedError,
        (),
    ),
    "401, never a challenge, nothing stored": (Guard(mute=True), {}, UnauthorizedError, ()),
    "403 with a challenge": (Guard(403, 403, eager=True), {"docker": STORED}, None, ()),
    "404 with a challenge": (Guard(404, 404, eager=True), {"docker": STORED}, None, ()),
    "no permission": (_bearer(denied=True), {"docker": STORED}, UnauthorizedError, ()),
    "an entry of a namespace, refused": (
        Guard(right="x"),
        {"docker": json.dumps({"auths": {f"{HOST}/team": {"auth": BASIC}}})},
        UnauthorizedError,
        (),
    ),
    "404, nothing stored": (Guard(404), {}, NotFoundError, ()),
    "auth wrapped": (Guard(right=LONG), {"docker": _entry(auth=_wrap(LONG))}, None, ()),
    "auth wrapped, CRLF": (
        Guard(right=LONG),
        {"docker": _entry(auth=_wrap(LONG, "\r\n"))},
        None,
        (),
    ),
    "auth with a line end": (Guard(), {"docker": _entry(auth=BASIC + "\n")}, None, ()),
    "auth without padding": (
        Guard(right=LONG),
        {"docker": _entry(auth=LONG.rstrip("="))},
        None,
        (),
    ),
    "auth with the alphabet of URLs": (
        Guard(right=LONG),
        {"docker": _entry(auth=LONG.translate(str.maketrans("+/", "-_")))},
        None,
        (),
    ),
    "auth with a NUL": (
        Guard(),
        {"docker": _entry(auth=base64.b64encode(f"operator:{PASSWORD}\0".encode()).decode())},
        None,
        (),
    ),
    "auth garbage": (Guard(), {"docker": _entry(auth="!!")}, UnauthorizedError, ("entry HOST",)),
    "auth garbage, next file": (
        Guard(),
        {"docker": _entry(auth="!!"), "podman": STORED},
        None,
        ("entry HOST",),
    ),
    "empty auth, next file": (Guard(), {"docker": _entry(auth=""), "podman": STORED}, None, ()),
    "empty file": (OPEN, {"docker": ""}, None, ("config.json: cannot be read: it is empty",)),
    "empty file of podman": (OPEN, {"podman": ""}, None, ("auth.json: cannot be read",)),
    "half a file": (OPEN, {"docker": '{"auths": {'}, None, ("config.json: cannot be read",)),
    "not an object": (OPEN, {"docker": "[]"}, None, ("config.json: cannot be read: it is not",)),
    "auths is a list": (OPEN, {"docker": '{"auths": []}'}, None, ("auths has an unexpected",)),
    "deep": (OPEN, {"docker": "[" * 100_000}, None, ("config.json: cannot be read",)),
    "a directory": (OPEN, {"is_directory": True}, None, ("config.json: cannot be read: Is a dir",)),
    "broken, next file": (Guard(), {"docker": "{", "podman": STORED}, None, ("config.json",)),
    "byte order mark": (Guard(), {"docker": "\ufeff" + STORED}, None, ()),
    "variable": (Guard(), {"docker_auth_config": STORED}, None, ()),
    "variable before the file": (
        Guard(),
        {"docker_auth_config": STORED, "docker": _entry(auth=LONG)},
        None,
        (),
    ),
    "variable without the host": (
        Guard(),
        {"docker_auth_config": '{"auths": {"other.example.com": {}}}', "docker": STORED},
        None,
        (),
    ),
    "variable broken": (
        Guard(),
        {"docker_auth_config": "{", "docker": STORED},
        None,
        ("DOCKER_AUTH_CONFIG: cannot be read",),
    ),
    "key with a scheme and a path": (
        Guard(),
        {"docker": json.dumps({"auths": {f"https://{HOST}/v2/": {"auth": BASIC}}})},
        None,
        (),
    ),
    "expired, public": (
        _bearer(right="x", anonymous=200, anyone=200),
        {"docker": STORED},
        None,
        ("config.json: refused by the token service 127.0.0.1 (401); continuing without",),
    ),
    "expired (403), public": (
        _bearer(right="x", refusal=403, anonymous=200, anyone=200),
        {"docker": STORED},
        None,
        ("(403); continuing without",),
    ),
    "expired, private": (
        _bearer(right="x", anonymous=200),
        {"docker": STORED},
        UnauthorizedError,
        ("continuing without",),
    ),
    "expired, given": (
        _bearer(right="x", anonymous=200, anyone=200),
        {"basic_auth": BASIC},
        UnauthorizedError,
        (),
    ),
    "refused, Basic": (Guard(right="x"), {"docker": STORED}, UnauthorizedError, ()),
    "an expired access token": (
        _bearer(anonymous=200, anyone=200),
        {"docker": _entry(registrytoken="0ld")},
        UnauthorizedError,
        (),
    ),
}
# name: the end of the line about credentials
ERRORS = {
    "404 for anonymous, /v2/ open": "the stored credentials: not sent, since HOST did not ask",
    "404, nothing stored": "none for HOST in DIR/config.json, DIR/auth.json",
    "404, wrong password": "config.json: refused by HOST (401)",
    "401, never a challenge, wrong password": "config.json: refused by HOST (401)",
    "401, never a challenge, nothing stored": "none for HOST in DIR/config.json, DIR/auth.json",
    "no permission": "config.json: accepted by HOST, but without this permission",
    "an entry of a namespace, refused": "config.json (the entry HOST/team): refused by HOST (401)",
    "an expired access token": "config.json: refused by HOST (401)",
    "refused, Basic": "config.json: refused by HOST (401)",
    "auth garbage": "the entry HOST has no valid credentials",
    "expired, private": "config.json: refused by the token service 127.0.0.1 (401)",
    "expired, given": "the given username and password: refused by the token service",
}


def _connect(
    host: str, directory: Path, events: list[CredentialEvent], **options: Any
) -> ClientOptions:
    """Return options for the files ``docker`` and ``podman``; HOST in their texts is the host."""
    texts = {"docker": directory / "config.json", "podman": directory / "auth.json"}
    for name, path in texts.items():
        if (text := options.pop(name, None)) is not None:
            path.write_text(text.replace(HOST, host), "utf-8")
    if options.pop("is_directory", False):
        texts["docker"].mkdir()
    if "docker_auth_config" in options:
        options["docker_auth_config"] = options["docker_auth_config"].replace(HOST, host)
    return ClientOptions(
        docker_config=directory,
        container_auth=(texts["podman"],),
        on_credential=events.append,
        **options,
    )


def _pull(guard: Guard, connection: ClientOptions) -> None:
    reference = Reference.parse(f"{guard.registry.host}/team/x:v1")
    with Repository(reference, connection) as repository:
        repository.resolve(reference)


@pytest.mark.parametrize("name", PULLS)
def test_credentials_are_used_or_the_reason_is_stated(name: str, tmp_path: Path) -> None:
    template, options, error, warnings = PULLS[name]
    guard, events = replace(template), list[CredentialEvent]()
    with guard.registry.running():
        host = guard.registry.host
        connection = _connect(host, tmp_path, events, **options)
        if error is None:
            _pull(guard, connection)
        else:
            with pytest.raises(error) as raised:
                _pull(guard, connection)
            line = raised.value.facts["credentials"]
            expected = ERRORS[name].replace(HOST, host).replace("DIR", str(tmp_path))
            assert expected in line
            assert PASSWORD not in line
    texts = [f"{event.place}: {event.result}" for event in events if event.is_warning]
    assert len(texts) == len(warnings), texts
    for text, expected in zip(texts, warnings, strict=True):
        assert expected.replace(HOST, host) in text
    assert not any(PASSWORD in str(event) or BASIC in str(event) for event in events)


def test_every_error_of_the_table_has_its_line() -> None:
    assert {name for name, case in PULLS.items() if case[2] is not None} == set(ERRORS)


def test_a_file_of_another_user_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a file that could be looked for is warned of."""
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for directory, count in ((tmp_path, 1), (tmp_path / "absent", 0)):
        guard, events = replace(OPEN), list[CredentialEvent]()
        with guard.registry.running():
            _pull(guard, ClientOptions(docker_config=directory, on_credential=events.append))
        assert [event.is_warning for event in events] == [bool(count)]
        assert events[0].result == "cannot be read: Permission denied"


@pytest.mark.parametrize(("status", "requests"), [(200, 1), (404, 2)])
def test_public_content_costs_no_request_more(status: int, requests: int, tmp_path: Path) -> None:
    """Nor is a helper run for it; /v2/ is asked once for content that is not found."""
    guard = Guard(status, 200)
    with guard.registry.running():
        connection = _connect(guard.registry.host, tmp_path, [], docker=STORED)
        reference = Reference.parse(f"{guard.registry.host}/team/x:v1")
        with Repository(reference, connection) as repository:
            for _ in range(3):
                try:
                    repository.resolve(reference)
                except NotFoundError:
                    assert status == 404
    assert len(guard.registry.seen) == 3 + (requests - 1)
    assert not any("Authorization" in seen.headers for seen in guard.registry.seen)


def test_the_scope_of_the_repository_is_requested(tmp_path: Path) -> None:
    """Not the scope in the challenge of /v2/."""
    guard = _bearer(first=404)
    with guard.registry.running():
        _pull(guard, _connect(guard.registry.host, tmp_path, [], docker=STORED))
    (token,) = [seen.path for seen in guard.registry.seen if seen.path.startswith("/token")]
    assert token == "/token?scope=repository%3Ateam%2Fx%3Apull"


def test_a_busy_token_service_does_not_make_content_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request for a token after a 404 is repeated, as any other."""
    skip_waiting(monkeypatch)
    guard = _bearer(first=404)
    issue, answers = guard._issue, [Answer(503), Answer(429)]
    monkeypatch.setattr(guard, "_issue", lambda sent: answers.pop() if answers else issue(sent))
    with guard.registry.running():
        _pull(guard, _connect(guard.registry.host, tmp_path, [], docker=STORED))
    assert not answers


def test_given_credentials_are_sent_for_public_content(tmp_path: Path) -> None:
    guard = Guard(first=200)
    with guard.registry.running():
        _pull(guard, _connect(guard.registry.host, tmp_path, [], basic_auth=BASIC))
    assert [seen.headers.get("Authorization") for seen in guard.registry.seen] == [
        None, f"Basic {BASIC}"
    ]  # fmt: skip


@pytest.mark.parametrize("status", [404, 403])
def test_no_credentials_follow_a_redirect_that_is_refused(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedRegistry(lambda _: Answer(status)).running() as cdn:
        guard = Guard()

        def redirect(_: Seen) -> Answer:
            return Answer(307, {"Location": f"http://{cdn.host}/blob"})

        monkeypatch.setattr(guard, "_serve", redirect)
        with guard.registry.running():
            connection = _connect(guard.registry.host, tmp_path, [], docker=STORED)
            with pytest.raises(AccessError) as raised:
                _pull(guard, connection)
    assert f"{cdn.host}: gets no credentials" in raised.value.facts["credentials"]
    assert not any("Authorization" in seen.headers for seen in cdn.seen)


def test_given_credentials_are_sent_for_a_list_of_repositories(tmp_path: Path) -> None:
    """Many registries list the public repositories to all."""
    guard = Guard(first=200)
    with guard.registry.running():
        connection = _connect(guard.registry.host, tmp_path, [], basic_auth=BASIC)
        with Session(Reference(guard.registry.host, "catalog"), connection) as session:
            session.request("GET", session.catalog).close()
    assert guard.registry.seen[-1].headers["Authorization"] == f"Basic {BASIC}"


def test_given_credentials_that_are_withheld_are_warned_of(tmp_path: Path) -> None:
    """Also if the content is public."""
    service, events = _bearer(anonymous=200), list[CredentialEvent]()
    with service.registry.running():
        realm = f"http://{service.registry.host.replace('127.0.0.1', 'localhost')}/token"
        guard = _bearer(realm=realm, anyone=200)
        with guard.registry.running():
            _pull(guard, _connect(guard.registry.host, tmp_path, events, basic_auth=BASIC))
    (warning,) = [event for event in events if event.is_warning]
    assert warning.result.startswith("not sent to the token service localhost")


@pytest.mark.parametrize("is_public", [True, False])
def test_a_token_service_elsewhere_is_named_with_its_setting(
    is_public: bool, tmp_path: Path
) -> None:
    """Also if it gives an anonymous token, and the repository is then not found."""
    service = _bearer(anonymous=200 if is_public else 401)
    with service.registry.running():
        realm = f"http://{service.registry.host.replace('127.0.0.1', 'localhost')}/token"
        guard = _bearer(realm=realm, anyone=404)
        with guard.registry.running():
            host = guard.registry.host
            connection = _connect(host, tmp_path, [], docker=STORED)
            with pytest.raises(NotFoundError if is_public else UnauthorizedError) as raised:
                _pull(guard, connection)
            with pytest.raises(UnauthorizedError, match="the password was not sent") as refused:
                login(host, "operator", PASSWORD, connection)
    for error in (raised.value, refused.value):
        assert error.remedy == "trust_realm"
        assert error.facts["realms"] == "localhost"
        assert "not sent to the token service localhost" in error.facts["credentials"]
    assert not any("Authorization" in seen.headers for seen in service.registry.seen)


# name: registry, True if the right password is stored, the error for another one
LOGINS: dict[str, tuple[Callable[[], Guard], bool, str]] = {
    "Basic": (Guard, True, "rejected the username or password"),
    "token": (_bearer, True, "rejected the username or password"),
    "token for anonymous too": (
        lambda: _bearer(anonymous=200),
        True,
        "rejected the username or password",
    ),
    "token for anyone": (
        lambda: _bearer(anonymous=200, refusal=200, anyone=200),
        False,
        "accepts any username and password",
    ),
    "open, checks what is sent": (
        lambda: Guard(200, 200),
        True,
        "rejected the username or password",
    ),
    "no challenge": (lambda: Guard(mute=True), True, "rejected the username or password"),
    "no password is right": (lambda: Guard(right="x"), False, "rejected the username or password"),
}


@pytest.mark.parametrize("name", LOGINS)
def test_a_login_proves_that_the_password_is_required(name: str, tmp_path: Path) -> None:
    make, is_stored, reason = LOGINS[name]
    guard, file = make(), tmp_path / "config.json"
    with guard.registry.running():
        connection = _connect(guard.registry.host, tmp_path, [])
        with pytest.raises(UnauthorizedError, match=reason):
            login(guard.registry.host, "operator", "wrong", connection)
        assert not file.exists()
        if is_stored:
            login(guard.registry.host, "operator", PASSWORD, connection)
            assert json.loads(file.read_text())["auths"] == {guard.registry.host: {"auth": BASIC}}


@pytest.mark.parametrize(
    ("files", "place", "reason"),
    [
        ({"docker_auth_config": STORED}, "DOCKER_AUTH_CONFIG", "is used instead of what is stored"),
        ({"docker_auth_config": "{}"}, "", ""),
        (
            {"docker": json.dumps({"auths": {f"{HOST}/team": {"auth": BASIC}}})},
            "config.json",
            "the entry HOST/team is used instead for its repositories",
        ),
    ],
)
def test_a_login_warns_of_what_hides_it(
    files: dict[str, str], place: str, reason: str, tmp_path: Path
) -> None:
    guard, events = Guard(), list[CredentialEvent]()
    with guard.registry.running():
        host = guard.registry.host
        login(host, "operator", PASSWORD, _connect(host, tmp_path, events, **files))
    warnings = [event for event in events if event.is_warning]
    assert [event.result for event in warnings] == ([reason.replace(HOST, host)] if reason else [])
    assert all(event.place.endswith(place) for event in warnings)


def test_a_lack_of_permission_is_not_a_wrong_password(tmp_path: Path) -> None:
    guard = _bearer(denied=True)
    with guard.registry.running(), pytest.raises(UnauthorizedError) as raised:
        _pull(guard, _connect(guard.registry.host, tmp_path, [], docker=STORED))
    assert not raised.value.remedy
    assert raised.value.hint == "ask for the permission, or log in with another account"


def test_a_name_and_a_password_are_the_bytes_of_the_shell() -> None:
    expected = base64.b64encode("u:pä".encode()).decode()
    assert encode_basic("u", "pä") == expected
    assert encode_basic("u", "p\udcc3\udca4") == expected
    for password in ("p\udcff", "p\ud800"):
        with pytest.raises(UsageError, match="not in UTF-8"):
            encode_basic("u", password)


@pytest.mark.parametrize(
    "text", ["http://r.example.com", "https://r.example.com/v2/", "r.example.com/", "r.example.com"]
)
def test_a_host_is_named_as_docker_accepts_it(text: str) -> None:
    assert _parse_host(text) == "r.example.com"


@pytest.mark.parametrize("only", ["catalog", "uploads", ""])
def test_a_login_finds_a_request_that_is_checked(only: str, tmp_path: Path) -> None:
    """/v2/ ignores passwords; another request is refused without the right one."""

    def script(seen: Seen) -> Answer:
        is_right = seen.headers.get("Authorization") == f"Basic {BASIC}"
        if only and only in seen.path and not is_right:
            return Answer(401, {"WWW-Authenticate": "Basic realm=x"})
        return Answer(202 if seen.method == "POST" else 200)

    with ScriptedRegistry(script).running() as registry:
        connection = _connect(registry.host, tmp_path, [])
        with pytest.raises(UnauthorizedError, match="rejected" if only else "accepts any"):
            login(registry.host, "operator", "wrong", connection)
        if only:
            login(registry.host, "operator", PASSWORD, connection)
    assert (tmp_path / "config.json").exists() == bool(only)


def test_a_logout_removes_from_the_file_that_is_used(tmp_path: Path) -> None:
    connection = _connect("r.example.com", tmp_path, [], docker="{}", podman=STORED)
    assert logout("r.example.com", connection) == str(tmp_path / "auth.json")
    with pytest.raises(NotFoundError):
        logout("r.example.com", connection)


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("Registry.Example.com", "registry.example.com"),
        ("registry.example.com:443", "registry.example.com"),
        ("https://registry.example.com", "registry.example.com:443"),
        ("registry.example.com", "REGISTRY.example.com"),
    ],
)
def test_a_key_names_an_origin(key: str, registry: str) -> None:
    source = AuthSource("file", {"auths": {key: {"auth": BASIC}}})
    trace = CredentialTrace(registry, lambda _: None)
    assert find_credential([source], registry, "team/x", trace) == Credential(basic=BASIC)
    assert find_credential([source], "registry.example.com:5000", "team/x", trace) is None


def test_refused_credentials_do_not_hide_public_content(tmp_path: Path) -> None:
    """After a 404 they are tried once; the requests after it are without them."""
    guard = Guard(404, right="x")
    with guard.registry.running():
        host = guard.registry.host
        reference = Reference.parse(f"{host}/team/x:v1")
        with Repository(reference, _connect(host, tmp_path, [], docker=STORED)) as repository:
            for _ in range(2):
                with pytest.raises(NotFoundError):
                    repository.resolve(reference)
            guard.first = 200
            repository.resolve(reference)
    sent = [seen for seen in guard.registry.seen if "Authorization" in seen.headers]
    assert len(sent) == 1

"""Credential helpers: their answers, their failures, and their end."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.credential import logout
from clowder_aimage.registry.credential_helper import (
    CredentialHelperError,
    HelperQueries,
    end_helpers,
    query_helper,
)
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry
from tests.wait import until

Install = Callable[[str], Path]
HOST = "r.example.com"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return ``install(text)``, which makes ``text`` the shell script of the helper ``own``."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(text: str) -> Path:
        path = tmp_path / "docker-credential-own"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("""echo '{"Username": "u", "Secret": "s"}'""", {"Username": "u", "Secret": "s"}),
        ("""echo '{"Username": "", "Secret": ""}'""", None),
        ("echo 'credentials not found in native keychain'; exit 1", None),
        ("echo 'credentials not found in native keychain' >&2; exit 1", None),
    ],
)
def test_answers(install: Install, text: str, stored: dict[str, str] | None) -> None:
    install(text)
    assert query_helper("own", "r.example.com") == stored


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "echo 'the store is locked' >&2; exit 1",
            r"failed: the store is locked \(exit status 1\)",
        ),
        ("echo 'error: no key'; exit 3", r"failed: error: no key \(exit status 3\)"),
        ("exit 1", "failed: no message"),
        ("kill -9 $$", r"failed: no message \(exit status -9\)"),
        ("""echo '{"Secret": "s"}'; echo why >&2; exit 1""", r"failed: why"),
        ("echo no", "other than a JSON object"),
        ("echo '[]'", "other than a JSON object"),
        ("echo '{}'", "other than a JSON object"),
        ("""echo '{"Username": 1, "Secret": 2}'""", "other than a JSON object"),
        ("printf '\\377'", "other than a JSON object"),
        ("", "other than a JSON object"),
    ],
)
def test_failures_have_a_reason(install: Install, text: str, reason: str) -> None:
    install(text)
    with pytest.raises(CredentialHelperError, match=f"docker-credential-own .*{reason}"):
        query_helper("own", "r.example.com")


@pytest.mark.parametrize(
    ("text", "name", "auths", "error"),
    [
        ("", "own", {}, None),
        ("", "own", {HOST: {}}, None),
        ("echo 'credentials not found in native keychain'; exit 1", "own", {HOST: {}}, None),
        ("echo 'credentials not found in native keychain'; exit 1", "own", {}, NotFoundError),
        ("echo locked; exit 1", "own", {HOST: {}}, CredentialHelperError),
        ("", "absent", {HOST: {"auth": "dTpw"}}, None),
        ("", "absent", {}, CredentialHelperError),
    ],
)
def test_a_logout_removes_what_it_can(
    install: Install,
    text: str,
    name: str,
    auths: dict[str, Any],
    error: type[AImageError] | None,
    tmp_path: Path,
) -> None:
    install(f"cat > {tmp_path}/input; {text}")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"credsStore": name, "auths": auths}))
    with pytest.raises(error) if error else nullcontext():
        logout(HOST, ClientOptions(docker_config=tmp_path))
    assert not json.loads(file.read_text())["auths"]


def test_programs_that_cannot_be_run_are_named(install: Install) -> None:
    with pytest.raises(CredentialHelperError, match="docker-credential-absent is not installed"):
        query_helper("absent", "r.example.com")
    with pytest.raises(CredentialHelperError, match="is not the name of a program"):
        query_helper("../own", "r.example.com")
    path = install("")
    path.write_text("#!/no/such/interpreter\n")
    with pytest.raises(CredentialHelperError, match="cannot be run: No such file"):
        query_helper("own", "r.example.com")
    path.write_bytes(b"\x7fELF")
    with pytest.raises(CredentialHelperError, match="cannot be run: Exec format error"):
        query_helper("own", "r.example.com")


def test_a_helper_that_hangs_is_not_run_again_for_some_minutes(install: Install) -> None:
    path, now = install("exec sleep 600"), [1000.0]
    queries = HelperQueries(lambda name, server: query_helper(name, server, 0.1), lambda: now[0])
    with pytest.raises(CredentialHelperError, match="did not answer"):
        queries("own", "r.example.com")
    path.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(CredentialHelperError, match="did not answer"):
        queries("own", "other.example.com")
    now[0] += 301
    with pytest.raises(CredentialHelperError, match="no message"):
        queries("own", "r.example.com")


def is_gone(path: Path) -> bool:
    """Return True if the process whose id is in a file has ended."""
    try:
        stat = Path(f"/proc/{int(path.read_text())}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", ["deadline", "exit"])
def test_a_helper_that_hangs_is_ended_with_its_group(
    install: Install, tmp_path: Path, end: str
) -> None:
    child = tmp_path / "child"
    install(f"sleep 600 & echo $! > {child}.part; mv {child}.part {child}; wait")
    errors: list[Exception] = []

    def query() -> None:
        try:
            query_helper("own", "r.example.com", 3.0 if end == "deadline" else 600.0)
        except CredentialHelperError as error:
            errors.append(error)

    thread = threading.Thread(target=query)
    thread.start()
    until(child.exists)
    if end == "exit":
        end_helpers()
    thread.join()
    until(lambda: is_gone(child))
    (error,) = errors
    assert ("did not answer within 3 seconds" in str(error)) == (end == "deadline")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_a_verb_ends_the_helper(
    install: Install, tmp_path: Path, aimage: Callable[[], Aimage], number: signal.Signals
) -> None:
    child, here = tmp_path / "child", aimage()
    install(f"sleep 600 & echo $! > {child}.part; mv {child}.part {child}; wait")
    challenge = Answer(401, {"WWW-Authenticate": "Basic realm=x"})
    with ScriptedRegistry(lambda _: challenge).running() as registry:
        here.environment["DOCKER_AUTH_CONFIG"] = '{"credsStore": "own"}'
        process = here.start("resolve", f"{registry.host}/x:v1")
        until(child.exists)
        process.send_signal(number)
        process.communicate()
    until(lambda: is_gone(child))
    assert process.returncode == (130 if number == signal.SIGINT else -number)

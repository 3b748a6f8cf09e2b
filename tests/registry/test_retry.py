"""Retry conditions, delays and limits, with an injected clock."""

from __future__ import annotations

import email.utils
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content.parallel import ParallelStoppedError
from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.errors import (
    AccessError,
    NetworkError,
    NotFoundError,
    RegistryError,
    UnauthorizedError,
    VerificationError,
)
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.retry import (
    ATTEMPTS,
    LONGEST_PAUSE,
    LONGEST_WAIT,
    BrokenOffError,
    is_transient,
    retry_call,
)
from clowder_aimage.registry.session import Session
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving
from tests.wait import until

NOW = 1_800_000_000.0
MANIFEST, BLOBS = artifact(b"{}", b"weights")


class Time:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = NOW
        self.slept: list[Any] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def failing(*errors: Any) -> tuple[Callable[[], int], list[int]]:
    """Return a function that fails in these ways, then returns its number of calls."""
    left = list(errors)
    calls = []

    def function() -> int:
        calls.append(1)
        if left:
            raise left.pop(0)
        return len(calls)

    return function, calls


@pytest.mark.parametrize("status", [408, 500, 504, 599])
def test_transient_statuses_are_retried(status: int) -> None:
    function, _ = failing(RegistryError("x", status=status))
    assert retry_call(function, sleep=lambda _: None) == 2


@pytest.mark.parametrize(
    "error",
    [
        *(RegistryError("x", status=code) for code in (0, 400, 501, 511, 429, 503)),
        NetworkError("refused"),
        UnauthorizedError("401"),
        NotFoundError("404"),
        VerificationError("digest"),
        OSError("disk"),
    ],
)
def test_permanent_errors_are_not_retried(error: Any) -> None:
    assert not is_transient(error)
    function, calls = failing(error)
    with pytest.raises(type(error)):
        retry_call(function, sleep=lambda _: None)
    assert len(calls) == 1


def test_the_last_error_is_raised_after_all_attempts() -> None:
    time = Time()
    function, calls = failing(*(BrokenOffError(str(count)) for count in range(9)))
    with pytest.raises(BrokenOffError, match=str(ATTEMPTS - 1)):
        retry_call(function, sleep=time.sleep)
    assert len(calls) == ATTEMPTS
    assert len(time.slept) == ATTEMPTS - 1


def test_delays_have_full_jitter_and_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return high

    monkeypatch.setattr("random.uniform", uniform)
    time = Time()
    function, _ = failing(*(BrokenOffError("x") for _ in range(8)))
    retry_call(function, progress=itertools.count().__next__, sleep=time.sleep)
    assert {low for low, _ in bounds} == {0}
    assert time.slept == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, *[LONGEST_WAIT] * 3])


def test_an_attempt_with_progress_is_not_counted() -> None:
    function, calls = failing(*(BrokenOffError("x") for _ in range(99)))
    with pytest.raises(BrokenOffError):
        retry_call(function, progress=lambda: min(len(calls), 20), sleep=lambda _: None)
    assert len(calls) == 20 + ATTEMPTS - 1


def busy(times: int, status: Any = 429, **headers: Any) -> ScriptedRegistry:
    """Return a registry that answers ``count`` requests as busy."""
    right, left = serving(MANIFEST, BLOBS), [None] * times

    def script(seen: Seen) -> Answer:
        if left:
            left.pop()
            return Answer(status, headers)
        return right(seen)

    return ScriptedRegistry(script)


def resolve(registry: ScriptedRegistry, tmp_path: Path, time: Time) -> Descriptor:
    reference = Reference.parse(f"{registry.host}/x")
    connection = ClientOptions(docker_config=tmp_path, clock=time.clock, sleep=time.sleep)
    with Repository(reference, connection) as repository:
        return repository.resolve(reference)


@pytest.mark.parametrize(
    ("status", "value"), [(429, "17"), (503, email.utils.formatdate(NOW + 17, usegmt=True))]
)
def test_retry_after_delays_the_next_request(tmp_path: Path, status: int, value: str) -> None:
    time = Time()
    with busy(1, status, **{"Retry-After": value}).running() as registry:
        resolve(registry, tmp_path, time)
        assert len(registry.seen) == 2
    assert time.slept == [17]


def test_a_retry_after_over_the_limit_fails(tmp_path: Path) -> None:
    time = Time()
    with (
        busy(1, **{"Retry-After": "86400"}).running() as registry,
        pytest.raises(RegistryError) as caught,
    ):
        resolve(registry, tmp_path, time)
    assert not time.slept and len(registry.seen) == 1
    assert caught.value.retry_after == 3600
    assert "try again in 24 hours" in (caught.value.hint or "")


def test_a_retry_after_at_the_limit_is_retried(tmp_path: Path) -> None:
    time = Time()
    with busy(1, **{"Retry-After": "60"}).running() as registry:
        resolve(registry, tmp_path, time)
    assert time.slept == [LONGEST_PAUSE]


def test_a_permanent_error_starts_no_pause(tmp_path: Path) -> None:
    time = Time()
    with (
        busy(1, 404, **{"Retry-After": "9"}).running() as registry,
        pytest.raises(NotFoundError),
    ):
        resolve(registry, tmp_path, time)
    assert time.slept == []


def test_a_refused_connection_is_not_retried(tmp_path: Path) -> None:
    with ScriptedRegistry(lambda _: Answer()).running() as registry:
        pass
    time = Time()
    with pytest.raises(NetworkError, match="cannot reach"):
        resolve(registry, tmp_path, time)
    assert time.slept == []


def test_closing_the_session_ends_a_pause(tmp_path: Path) -> None:
    """No thread waits for a closed session."""
    connection = ClientOptions(docker_config=tmp_path)
    with busy(1, **{"Retry-After": "60"}).running() as registry:
        session = Session(Reference(registry.host, "x"), connection)

        def close() -> None:
            until(lambda: registry.seen)
            session.close()

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(ParallelStoppedError):
            session.request("GET", session.build_url("tags/list"))
        thread.join()


def is_upload(seen: Seen) -> bool:
    return seen.method == "PUT" and "/upload" in seen.path


def test_a_refused_upload_is_sent_again_without_a_question(tmp_path: Path) -> None:
    """No attempt is counted, however often it is refused."""
    time, left, stored = Time(), [None] * 20, list[bytes]()

    def script(seen: Seen) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload"})
        if is_upload(seen) and left:
            left.pop()
            return Answer(429)
        if is_upload(seen):
            stored.append(seen.body)
            return Answer(201)
        return Answer(404)

    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        connection = ClientOptions(docker_config=tmp_path, clock=time.clock, sleep=time.sleep)
        with Repository(reference, connection) as repository:
            repository.push(Descriptor.of("text/plain", b"abc"), build_bytes_body(b"abc"))
    assert stored == [b"abc"]
    assert not [path for path in registry.asked("GET") if "/upload" in path]


@pytest.mark.parametrize(
    ("status", "headers", "requests"),
    [
        (429, {}, 5),
        (503, {}, 5),
        (529, {}, 5),
        (403, {"Retry-After": "1"}, 5),
        (429, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2"}, 5),
        (429, {"Retry-After": "21600"}, 1),
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "7200"}, 1),
    ],
)
def test_a_registry_that_refuses_everything_fails_after_a_time(
    status: int, headers: dict[str, str], requests: int, tmp_path: Path
) -> None:
    time = Time()
    connection = ClientOptions(docker_config=tmp_path, clock=time.clock, sleep=time.sleep)
    with ScriptedRegistry(lambda _: Answer(status, headers)).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        with (
            Repository(reference, connection) as repository,
            pytest.raises(AccessError, match=str(status)),
        ):
            repository.resolve(reference)
        assert requests <= len(registry.seen) <= 25
    assert sum(time.slept) < 15


def test_a_long_body_is_progress(tmp_path: Path) -> None:
    """Others may be refused while one connection receives, however long that takes."""
    time, first = Time(), [None]

    def script(seen: Seen) -> Answer:
        if first:
            first.pop()
            return Answer(200, {}, b"x" * 1_000_000)
        return Answer(429) if time.now - NOW < 1000 else Answer(200)

    connection = ClientOptions(docker_config=tmp_path, clock=time.clock, sleep=time.sleep)
    with (
        ScriptedRegistry(script).running() as registry,
        Session(Reference(registry.host, "x"), connection) as session,
    ):
        body = session.request("GET", session.build_url("blobs/1"))
        session.request("GET", session.build_url("blobs/2")).close()
        assert time.now - NOW > 1000
        body.close()

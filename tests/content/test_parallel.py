"""Several threads on one job: cancellation and the error that is raised."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import wait
from typing import Any, NoReturn

import pytest

from clowder_aimage.content.parallel import ParallelStoppedError, run_parallel
from clowder_aimage.errors import NetworkError


def test_no_call_starts_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the waiting thread notices late."""
    stopped, begun = threading.Event(), []
    monkeypatch.setattr(concurrent.futures, "wait", lambda futures, **_: wait(futures, timeout=60))

    def fail() -> NoReturn:
        raise NetworkError("gone")

    def next_one() -> None:
        if not stopped.is_set():
            begun.append(1)

    with pytest.raises(NetworkError):
        run_parallel([fail, *[next_one] * 20], 1, stopped.set)
    assert begun == []


def test_cancelled_calls_are_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[list[Any]] = []

    def watched(futures: Any, **options: Any) -> Any:
        awaited.append(list(futures))
        return wait(awaited[-1], **options)

    def fail() -> NoReturn:
        raise NetworkError("gone")

    monkeypatch.setattr(concurrent.futures, "wait", watched)
    with pytest.raises(NetworkError):
        run_parallel([fail, *[lambda: None] * 20], 1, lambda: None)
    assert awaited[-1] and not any(future.cancelled() for future in awaited[-1])


def test_the_failure_is_raised_rather_than_a_cancellation() -> None:
    stopped, both = threading.Event(), threading.Barrier(2)

    def fail() -> NoReturn:
        both.wait(60)
        raise NetworkError("gone")

    def other() -> NoReturn:
        both.wait(60)
        assert stopped.wait(60)
        raise ParallelStoppedError

    with pytest.raises(NetworkError):
        run_parallel([other, fail], 2, stopped.set)


def test_concurrency_is_limited() -> None:
    lock, under_way, most, done = threading.Lock(), [], [], []
    full = threading.Barrier(3)

    def call() -> None:
        with lock:
            under_way.append(1)
            most.append(len(under_way))
        full.wait(60)
        with lock:
            under_way.pop()
            done.append(1)

    run_parallel([call] * 9, 3, lambda: None)
    assert len(done) == 9
    assert max(most) == 3

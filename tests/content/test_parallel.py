"""Several threads at one job: who is stopped, and which error is told."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from clowder_aimage.content import parallel
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.errors import NetworkError


def test_nothing_begins_after_a_failure(monkeypatch):
    """Also when whoever waits for the threads is slow to notice."""
    stopped, begun = threading.Event(), []
    monkeypatch.setattr(parallel, "wait", lambda futures, **_: wait(futures, timeout=10))

    def fail():
        raise NetworkError("gone")

    def next_one():
        if not stopped.is_set():
            begun.append(1)

    with pytest.raises(NetworkError):
        in_parallel([fail, *[next_one] * 20], 1, stopped.set)
    assert begun == []


def test_the_failure_is_told_and_not_that_others_were_stopped():
    stopped, both = threading.Event(), threading.Barrier(2)

    def fail():
        both.wait(10)
        raise NetworkError("gone")

    def other():
        both.wait(10)
        assert stopped.wait(10)
        raise ParallelStoppedError

    with pytest.raises(NetworkError):
        in_parallel([other, fail], 2, stopped.set)


def test_all_calls_are_made_so_many_at_a_time():
    lock, under_way, most, done = threading.Lock(), [], [], []
    full = threading.Barrier(3)

    def call():
        with lock:
            under_way.append(1)
            most.append(len(under_way))
        full.wait(10)
        with lock:
            under_way.pop()
            done.append(1)

    in_parallel([call] * 9, 3, lambda: None)
    assert len(done) == 9
    assert max(most) == 3

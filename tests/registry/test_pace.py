"""Transfers from registries with a quota, event by event in a simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest

from clowder_aimage.registry.pace import FORGOTTEN, LONGEST_PAUSE, Pace, Paces

# Seconds to wait by the registry's answer at a time, 0 for "later", None for a success
Quota = Callable[[float], float | None]
WORKERS = 8


def bucket(rate: float, size: float) -> Quota:
    """Return a quota of ``rate`` requests per second, and of ``size`` at once."""
    level, filled_at = size, 0.0

    def take(timestamp: float) -> float | None:
        nonlocal level, filled_at
        level, filled_at = min(size, level + (timestamp - filled_at) * rate), timestamp
        if level < 1:
            return 0.0
        level -= 1
        return None

    return take


def window(rate: float, seconds: float = 1.0) -> Quota:
    """Return a quota for each window of ``seconds``."""
    current, count = -1, 0

    def take(timestamp: float) -> float | None:
        nonlocal current, count
        if (number := int(timestamp / seconds)) != current:
            current, count = number, 0
        count += 1
        return None if count <= rate * seconds else 0.0

    return take


def with_retry_after(quota: Quota) -> Quota:
    """Return a quota whose refusals say when to come back: in the next whole second."""

    def take(timestamp: float) -> float | None:
        return None if quota(timestamp) is None else 1.0 - timestamp % 1.0

    return take


def fail_between(start: float, end: float) -> Quota:
    """Return a registry that refuses all requests for a time."""
    return lambda timestamp: 0.0 if start <= timestamp < end else None


def shared(quota: Quota, every: float) -> Quota:
    """Return what remains of a quota beside another client, which never slows down."""
    next_at = 0.0

    def take(timestamp: float) -> float | None:
        nonlocal next_at
        while next_at <= timestamp:
            quota(next_at)
            next_at += every
        return quota(timestamp)

    return take


def run(quota: Quota, requests: int, latency: float = 0.01) -> tuple[float, int]:
    """Return the seconds of a transfer, and the number of refusals."""
    pace, left, refused, end = Pace(), requests, 0, 0.0
    order = itertools.count()
    # Time, number, and for an answer the time of its request and the answer
    events: list[tuple[float, int, float, float | None, bool]] = []
    for _ in range(WORKERS):
        heapq.heappush(events, (0.0, next(order), 0.0, None, False))
    while events:
        timestamp, _, sent_at, answer, is_answer = heapq.heappop(events)
        if is_answer and answer is None:
            pace.record_success("GET", sent_at)
            end = timestamp
        elif is_answer and answer is not None:
            left, refused = left + 1, refused + 1
            pace.record_refusal("GET", sent_at, timestamp, answer)
        if left:
            if (wait := pace.claim(timestamp)) > 0:
                heapq.heappush(events, (timestamp + wait, next(order), 0.0, None, False))
                continue
            left -= 1
            event = (timestamp + latency, next(order), timestamp, quota(timestamp), True)
            heapq.heappush(events, event)
    return end, refused


QUOTAS: dict[str, tuple[Callable[[float], Quota], float]] = {
    # the quota by its rate, and the most seconds by those of the ideal transfer
    "bucket": (lambda rate: bucket(rate, rate), 1.25),
    "bucket, Retry-After": (lambda rate: with_retry_after(bucket(rate, rate)), 1.25),
    "window": (window, 1.2),
    "window, Retry-After": (lambda rate: with_retry_after(window(rate)), 1.2),
    "window of 10 s": (lambda rate: window(rate, 10.0), 1.3),
    "no burst": (lambda rate: bucket(rate, 1.0), 2.5),
}


@pytest.mark.parametrize("rate", [1, 5, 40, 400])
@pytest.mark.parametrize("name", QUOTAS)
def test_a_transfer_uses_the_quota(name: str, rate: int) -> None:
    build, most = QUOTAS[name]
    requests = 30 * rate
    seconds, refused = run(build(rate), requests)
    assert seconds <= most * requests / rate
    assert refused <= 60 + requests / 20


def test_an_unlimited_registry_has_no_pace() -> None:
    seconds, refused = run(lambda _: None, 800)
    assert seconds == pytest.approx(1.0) and not refused


def test_an_outage_of_seconds_ends_nearly_when_the_registry_is_back() -> None:
    seconds, refused = run(fail_between(0.1, 8.0), 800)
    assert seconds < 8 * 1.5 + 2.0
    assert refused < 30


def test_the_rest_of_a_shared_quota_is_used() -> None:
    seconds, _ = run(shared(bucket(40, 40), every=1 / 20), 600)
    assert seconds < 1.3 * 600 / 20


def test_a_larger_quota_is_noticed() -> None:
    small, large = bucket(5, 5), bucket(100, 100)
    seconds, _ = run(lambda now: small(now) if now < 20 else large(now), 100 + 100 * 20)
    assert seconds < 20 + 2 * 20


def test_a_retry_after_pauses_all_requests() -> None:
    pace = Pace()
    assert pace.claim(100.0) == 0
    pace.record_refusal("GET", 100.0, 101.0, 9.0)
    assert pace.claim(105.0) == 5.0
    assert pace.claim(110.0) == 0


def test_refusals_without_a_success_are_measured_by_kind() -> None:
    pace = Pace()
    assert [pace.record_refusal("PUT", at, at) for at in (0.0, 20.0, 40.0)] == [0, 20, 40]
    pace.record_success("GET", 41.0)
    assert pace.record_refusal("PUT", 50.0, 50.0) == 50
    pace.record_success("PUT", 51.0)
    assert pace.record_refusal("PUT", 52.0, 52.0) == 0
    # A later transfer begins anew
    assert pace.record_refusal("PUT", 53.0 + FORGOTTEN, 53.0 + FORGOTTEN) == 0


def test_pauses_grow_while_nothing_succeeds() -> None:
    pace, timestamp, pauses = Pace(), 0.0, []
    for _ in range(15):
        pace.record_refusal("GET", timestamp, timestamp)
        pauses.append(pace.claim(timestamp))
        timestamp += pauses[-1]
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE


def test_a_registry_has_one_pace() -> None:
    paces = Paces()
    assert paces.get("a") is paces.get("a") is not paces.get("b")

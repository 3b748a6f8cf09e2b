"""The number of connections used for large blobs, by measured throughput."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clowder_aimage.content.chunk import START, ConcurrencyProbe

MIB = 1024 * 1024


def run(
    limit: int, rate_of: Callable[[Any], Any], seconds: float = 20.0
) -> tuple[ConcurrencyProbe, list[int], float]:
    """Return blocks of 1 MiB from ``width`` connections with the total rate ``rate_of(width)``."""
    width, now = ConcurrencyProbe(limit), 0.0
    seen = [width.value]
    while now < seconds and not width.settled:
        now += MIB / rate_of(width.value)
        width.record(MIB, now)
        seen.append(width.value)
    return width, seen, now


@pytest.mark.parametrize("limit", [4, 64])
def test_capped_connections_are_all_used(limit: int) -> None:
    width, seen, now = run(limit, lambda n: n * 20 * MIB)
    assert width.value == max(seen) == limit
    assert now < 5


@pytest.mark.parametrize("limit", [4, 16])
def test_connections_are_not_added_to_a_full_link(limit: int) -> None:
    width, seen, _ = run(limit, lambda _: 100 * MIB)
    assert width.value == START
    assert width.settled
    assert max(seen) == min(limit, 2 * START)  # another connection was tried


@pytest.mark.parametrize("rate", [256.5, 500])
def test_unthrottled_connections_are_not_increased(rate: float) -> None:
    width, seen, _ = run(16, lambda n: n * rate * MIB)
    assert max(seen) == START
    assert width.settled


def test_connections_below_the_speed_of_the_hash_are_increased() -> None:
    width, _, _ = run(16, lambda n: n * 254 * MIB)
    assert width.value == 16


def test_new_connections_have_some_time_to_reach_their_speed() -> None:
    width, now = ConcurrencyProbe(16), 0.0
    changed, before = 0.0, width.value
    while not width.settled and now < 20:
        # New connections deliver nothing for half a second
        rate = (width.value if now - changed > 0.5 else before) * 20 * MIB
        now += MIB / rate
        count = width.value
        width.record(MIB, now)
        if width.value != count:
            changed, before = now, count
    assert width.value == 16


def test_while_the_speed_is_measured_chunks_are_those_of_the_limit() -> None:
    width = ConcurrencyProbe(16)
    assert (width.value, width.expected) == (START, 16)
    full, _, _ = run(16, lambda _: 100 * MIB)
    assert full.expected == full.value == START


def test_six_connections_that_fill_the_link_are_kept() -> None:
    width, _, _ = run(16, lambda n: min(n, 6) * 50 * MIB)
    assert 4 <= width.value <= 6


@pytest.mark.parametrize(("limit", "value", "settled"), [(1, 1, True), (3, 3, True), (4, 3, False)])
def test_a_small_budget_limits_the_connections(limit: int, value: int, settled: bool) -> None:
    width = ConcurrencyProbe(limit)
    assert (width.value, width.settled) == (value, settled)


@pytest.mark.parametrize(("cores", "used", "value"), [(2, 0.6, START), (2, 0.4, 16), (8, 1.8, 16)])
def test_connections_are_not_added_to_a_busy_process(cores: int, used: float, value: int) -> None:
    """It does not wait for the link, however slow each connection is."""
    width, now = ConcurrencyProbe(16, cores), 0.0
    while not width.settled:
        now += 0.05 / width.value
        width.record(MIB, now, used * now)
    assert width.value == value

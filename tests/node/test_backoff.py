"""Retries of failed pulls: error codes, conditions and backoff."""

from __future__ import annotations

import math

from clowder_aimage.engine.backoff import CHANGE, LONGEST, SPACE, TIME, compute_backoff
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    RegistryError,
    StoreError,
    UnauthorizedError,
    UsageError,
    VerificationError,
)


def test_each_error_has_a_code_and_a_condition_for_the_next_attempt() -> None:
    errors = {
        NoSpaceError("x"): ("no_space", SPACE),
        UnauthorizedError("x"): ("unauthorized", CHANGE),
        NotFoundError("x"): ("not_found", CHANGE),
        VerificationError("x"): ("verification_failed", CHANGE),
        FormatError("x"): ("invalid", CHANGE),
        UsageError("x"): ("invalid", CHANGE),
        NetworkError("x"): ("unreachable", TIME),
        RegistryError("x", status=503): ("registry_failed", TIME),
        StoreError("x"): ("store_failed", TIME),
        AImageError("x"): ("failed", TIME),
    }
    found = {error: compute_backoff(error, 1, 0.5, 300.0) for error in errors}
    assert {error: (one.code, one.after) for error, one in found.items()} == errors


def test_backoff_doubles_up_to_a_maximum() -> None:
    longest = [
        compute_backoff(NetworkError("x"), attempts, 1.0, 300.0).delay for attempts in range(1, 40)
    ]
    assert longest[:4] == [2.0, 4.0, 8.0, 16.0]
    assert longest[-1] == LONGEST and longest == sorted(longest)


def test_backoff_is_jittered_over_the_whole_interval() -> None:
    assert compute_backoff(NetworkError("x"), 5, 0.25, 300.0).delay == 8.0
    assert compute_backoff(NetworkError("x"), 5, 0.0, 300.0).delay == 0.1  # the minimum delay


def test_a_longer_retry_after_is_used() -> None:
    error = RegistryError("x", status=429, retry_after=120.0)
    assert compute_backoff(error, 1, 0.5, 300.0).delay == 120.0
    assert compute_backoff(error, 20, 1.0, 300.0).delay == LONGEST


def test_permanent_errors_are_retried_at_the_next_tag_check() -> None:
    for attempts in (1, 50):
        assert compute_backoff(NotFoundError("x"), attempts, 0.0, 300.0).delay == 300.0
    assert compute_backoff(NotFoundError("x"), 1, 0.0, math.inf).delay == math.inf


def test_a_full_disk_is_not_retried_after_a_delay() -> None:
    assert compute_backoff(NoSpaceError("x"), 1, 0.0, 300.0).delay == math.inf

"""Backoff of pulls: when a failed pull is retried.

Requests within a pull are retried by registry/retry.py; this table is for whole pulls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from clowder_aimage import errors
from clowder_aimage.errors import AImageError

FIRST, LONGEST = 1.0, 300.0  # seconds of backing off
# After content that failed verification: it is fetched again completely
HOUR, DAY = 3600.0, 86400.0
TIME, SPACE, CHANGE = "time", "space", "change"
WRONG, STORE = "verification_failed", "store_failed"
# The model is missing, and the policy is "never"
NEVER_FETCHED = "never_fetched"

# The code of an error and the condition of the next attempt: time alone (backoff, or the next
# check of the tag), more space, or a change
_TABLE: tuple[tuple[type[AImageError], str, str], ...] = (
    (errors.NoSpaceError, "no_space", SPACE),
    (errors.UnauthorizedError, "unauthorized", CHANGE),
    (errors.NotFoundError, "not_found", CHANGE),
    (errors.VerificationError, WRONG, CHANGE),
    (errors.ContentError, "invalid", CHANGE),
    (errors.NetworkError, "unreachable", TIME),
    (errors.RegistryError, "registry_failed", TIME),
    (errors.StoreError, STORE, TIME),
)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The next attempt.

    ``code`` is machine-readable; ``after`` is TIME, SPACE or CHANGE; ``delay`` is in seconds,
    infinite if time alone is not sufficient.
    """

    code: str
    after: str
    delay: float


def compute_backoff(error: AImageError, attempts: int, chance: float, refresh: float) -> Backoff:
    """Return the attempt after ``attempts`` consecutive failures.

    The backoff is exponential with full jitter (Brooker, "Exponential Backoff And Jitter", 2015);
    ``chance``, in [0, 1), is the position in the interval. A longer Retry-After takes precedence.
    After an error that requires a change, the delay is ``refresh`` seconds.
    """
    rows = (row[1:] for row in _TABLE if isinstance(error, row[0]))
    code, after = next(rows, ("failed", TIME))
    if after != TIME:
        return Backoff(code, after, math.inf if after == SPACE else refresh)
    longest = min(LONGEST, FIRST * 2.0 ** min(attempts, 30))
    retry_after = getattr(error, "retry_after", 0.0)
    return Backoff(code, after, max(retry_after, longest * chance, 0.1))


def compute_full_backoff(failures: int, chance: float) -> float:
    """Return the delay in seconds after content failed verification ``failures`` times.

    ``chance``, in [0, 1), shortens it, so that nodes that failed together do not retry together.
    """
    return min(DAY, HOUR * 2.0 ** min(failures - 1, 10)) * (1.0 - chance / 4.0)

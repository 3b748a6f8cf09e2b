"""What becomes of a model that could not be had: when it is tried again, or after what.

The one table for it. A request inside of a pull has been repeated already (registry/retry.py); here
it is about whole pulls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from clowder_aimage.errors import (
    AImageError,
    ContentError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    RegistryError,
    StoreError,
    UnauthorizedError,
    UsageError,
    VerificationError,
)

FIRST, LONGEST = 1.0, 300.0  # seconds of backing off
HOUR, DAY = 3600.0, 86400.0  # of what was fetched and is wrong: all of it would come again
TIME, SPACE, CHANGE = "time", "space", "change"
WRONG, STORE = "verification_failed", "store_failed"
NEVER_FETCHED = "never_fetched"  # it is not here, and is not to be fetched

# What it is called, and what is waited for: time alone (backing off, or the next look at the tag),
# more space, or that something changes
_TABLE: tuple[tuple[type[AImageError], str, str, bool], ...] = (
    # error, code, waits for, backs off
    (NoSpaceError, "no_space", SPACE, False),
    (UnauthorizedError, "unauthorized", CHANGE, False),
    (NotFoundError, "not_found", CHANGE, False),
    (VerificationError, WRONG, CHANGE, False),
    (UsageError, "invalid", CHANGE, False),
    (ContentError, "invalid", CHANGE, False),
    (NetworkError, "unreachable", TIME, True),
    (RegistryError, "registry_failed", TIME, True),
    (StoreError, STORE, TIME, True),
)


@dataclass(frozen=True, slots=True)
class Backoff:
    """``code`` for machines; ``after`` is TIME, SPACE or CHANGE; ``delay`` in seconds, infinite
    where time alone changes nothing."""

    code: str
    after: str
    delay: float


def again(error: AImageError, attempts: int, chance: float, refresh: float) -> Backoff:
    """When to try again after the ``attempts``-th failure in a row.

    Backing off is exponential with full jitter (Brooker, "Exponential Backoff And Jitter", 2015):
    ``chance``, in [0, 1), says where in the interval; what a registry asked for (Retry-After)
    counts where it is longer. What only a change can mend is looked at again when the tag is
    (``refresh``), by its manifest alone.
    """
    found = next((row for row in _TABLE if isinstance(error, row[0])), None)
    code, after, backs_off = found[1:] if found else ("failed", TIME, True)
    if not backs_off:
        return Backoff(code, after, math.inf if after == SPACE else refresh)
    longest = min(LONGEST, FIRST * 2.0 ** min(attempts, 30))
    asked = getattr(error, "retry_after", 0.0)
    return Backoff(code, after, max(asked, longest * chance, 0.1))


def whole(times: int, chance: float) -> float:
    """For how many seconds content that was wrong ``times`` times is left alone, though its tag
    means the same as before: whoever keeps it may have mended it. A part of that is left to
    chance: nodes that failed together are not to come back together."""
    return min(DAY, HOUR * 2.0 ** min(times - 1, 10)) * (1.0 - chance / 4.0)

"""The one retry table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from clowder_aimage.errors import NetworkError, RegistryError

TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
ATTEMPTS = 4
_T = TypeVar("_T")


class BrokenOffError(NetworkError):
    """A connection that was there and went away: worth another try at once."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed a moment later.

    A refused connection, an unknown host, 401, 403, 404 and a wrong digest are not transient:
    the user hears of them at once.
    """
    if isinstance(error, RegistryError):
        return error.status in TRANSIENT_STATUS
    return isinstance(error, BrokenOffError)


def retrying(function: Callable[[], _T], *, attempts: int = ATTEMPTS) -> _T:
    """Call ``function`` until it succeeds, fails for good, or has had its attempts.

    Waits grow exponentially with full jitter, at most 5 s.
    """
    retryer = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
        retry=tenacity.retry_if_exception(is_transient),
        reraise=True,
    )
    return retryer(function)

"""The retry policy."""

from __future__ import annotations

import contextlib
import operator
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from clowder_aimage.errors import ManifestRefusedError, NetworkError, RegistryError
from clowder_aimage.registry.overload import OVERLOAD_STATUS

if TYPE_CHECKING:
    import tenacity

# 501, 505, 507 and 511 are permanent conditions (RFC 9110, 4918, 6585)
TRANSIENT_STATUS = frozenset({408, 429, *range(500, 600)}) - {501, 505, 507, 511}
ATTEMPTS = 4
# The most seconds between the first two attempts. Each later wait is twice as long.
FIRST_WAIT = 0.2
# Seconds between two attempts, unless the registry specifies a time.
LONGEST_WAIT = 5.0
# The most seconds to wait for Retry-After.
LONGEST_PAUSE = 60.0
_T = TypeVar("_T")


class BrokenOffError(NetworkError):
    """A connection was lost after it was established. The error is transient."""


class IntermediaryError(RegistryError):
    """A proxy or load balancer answered in place of the registry. The error is transient."""


class RequestDeferredError(NetworkError):
    """The registry limits requests, and the body must be opened again: the session waits.

    ``is_unread`` is True if the registry refused the request before it read the body.
    """

    def __init__(self, message: str, *, is_unread: bool) -> None:
        super().__init__(message)
        self.is_unread = is_unread


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed if it is repeated soon.

    A refused connection, an unknown host, 401, 403, 404, a wrong digest and a refused kind of
    manifest are not transient, and are raised at once. So is the refusal of an overloaded registry:
    the session has waited for it.
    """
    if isinstance(error, BrokenOffError | IntermediaryError):
        return True
    if isinstance(error, ManifestRefusedError):
        return False
    if isinstance(error, RegistryError):
        is_transient_status = error.status in TRANSIENT_STATUS - OVERLOAD_STATUS
        return is_transient_status and not error.retry_after
    return False


def retry_call(
    function: Callable[[], _T],
    *,
    progress: Callable[[], object] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """Call ``function`` until it succeeds, fails permanently, or fails ATTEMPTS times in a row.

    An attempt that changes the value of ``progress`` is not counted, nor one that is deferred.
    Waits grow exponentially with full jitter.
    """

    def attempt() -> _T:
        while True:
            with contextlib.suppress(RequestDeferredError):
                return function()

    try:
        # This nearly always succeeds: tenacity adds 7 % to the time of a request, and its import
        # takes 10 ms.
        return attempt()
    except Exception as error:
        if not is_transient(error):
            raise
    import tenacity

    failures, progress_before = 1, progress()

    def is_last(_: tenacity.RetryCallState) -> bool:
        nonlocal failures, progress_before
        current = progress()
        failures, progress_before = (failures + 1 if current == progress_before else 1), current
        return failures >= ATTEMPTS

    sleep(random.uniform(0, FIRST_WAIT))  # noqa: S311 - jitter
    retryer = tenacity.Retrying(
        stop=is_last,
        wait=tenacity.wait_random_exponential(multiplier=2 * FIRST_WAIT, max=LONGEST_WAIT),
        retry=tenacity.retry_if_exception(is_transient),
        sleep=sleep,
        reraise=True,
    )
    return retryer(attempt)


def retry_write(write: Callable[[], bool], *, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Call ``write`` until it returns True; return False if ATTEMPTS calls return False.

    Waits have jitter, so that clients that overwrite each other write at different times.
    """
    import tenacity

    retryer = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
        retry=tenacity.retry_if_result(operator.not_),
        retry_error_callback=lambda _: False,
        sleep=sleep,
    )
    return retryer(write)

"""The one retry table."""

from __future__ import annotations

import email.utils
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import requests
import tenacity

from clowder_aimage.errors import NetworkError, RegistryError

# 501, 505, 507 and 511 say that nothing will be different a moment later (RFC 9110, 4918, 6585)
TRANSIENT_STATUS = frozenset({408, 429, *range(500, 600)}) - {501, 505, 507, 511}
ATTEMPTS = 4
LONGEST_WAIT = 5.0  # seconds between two attempts, where the registry does not say
LONGEST_PAUSE = 60.0  # seconds that a registry may ask for with Retry-After
DEADLINE = 60.0  # seconds that one request may spend between its attempts
_T = TypeVar("_T")


class BrokenOffError(NetworkError):
    """A connection that was there and went away: worth another try at once."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed a moment later.

    A refused connection, an unknown host, 401, 403, 404 and a wrong digest are not transient:
    the user hears of them at once.
    """
    if isinstance(error, RegistryError):  # one that wants a long rest gets it: from who calls
        return error.status in TRANSIENT_STATUS and error.retry_after <= LONGEST_PAUSE
    return isinstance(error, BrokenOffError)


def retrying(
    function: Callable[[], _T],
    *,
    attempts: int = ATTEMPTS,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[], object] = lambda: None,
) -> _T:
    """Call ``function`` until it succeeds, fails for good, or has had its attempts.

    An attempt that changed what ``progress`` gives was not in vain: all others begin anew.

    Waits grow exponentially with full jitter. The deadline counts the waits alone: an upload may
    take hours, and what breaks it off near its end is still worth another try.
    """
    try:
        return function()  # as nearly always: a retryer costs half as much as a request
    except Exception as error:
        if not is_transient(error):
            raise
        failed: list[Exception] = [error]

    def again() -> _T:
        if failed:
            raise failed.pop()
        return function()

    retryer = tenacity.Retrying(
        stop=_Stop(attempts, progress),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=LONGEST_WAIT),
        retry=tenacity.retry_if_exception(is_transient),
        sleep=sleep,
        reraise=True,
    )
    return retryer(again)


class _Stop(tenacity.stop.stop_base):
    """Ends what has had its attempts since it last came forward, or would have waited longer
    than DEADLINE."""

    def __init__(self, attempts: int, progress: Callable[[], object]) -> None:
        self._attempts = attempts
        self._progress = progress
        self._reached: object = None
        self._failed, self._idle = 0, 0.0

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        reached = self._progress()
        if reached != self._reached:
            self._reached, self._failed, self._idle = reached, 0, retry_state.idle_for
        self._failed += 1
        waited = retry_state.idle_for - self._idle + retry_state.upcoming_sleep
        return self._failed >= self._attempts or waited > DEADLINE


def retry_after(value: str, now: float, longest: float = LONGEST_PAUSE) -> float:
    """For how many seconds a Retry-After header asks; 0 where it says nothing that can be meant.

    Source: RFC 9110, 10.2.3: a number of seconds, or a date.
    """
    text = value.strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return min(float(text), longest)
    try:
        until = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(until - now, 0.0), longest)


class Pause:
    """Until when a registry wants to be left alone. All threads of a session keep to it."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], object]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._until = 0.0
        self._lock = threading.Lock()

    def heed(self, response: requests.Response, *_: Any, **__: Any) -> None:
        """A hook of requests: look at an answer's Retry-After."""
        if response.status_code in TRANSIENT_STATUS:
            now = self._clock()
            until = now + retry_after(response.headers.get("Retry-After", ""), now)
            with self._lock:
                self._until = max(self._until, until)

    def wait(self) -> None:
        """Return when a request may be sent."""
        with self._lock:
            remaining = min(self._until - self._clock(), LONGEST_PAUSE)
        if remaining > 0:
            self._sleep(remaining)

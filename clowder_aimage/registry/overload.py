"""The answers of a registry that limits requests, and the pause that it asks for."""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping

# Statuses of a server that could answer, but not now: 509 and 529 are those of some hosts.
OVERLOAD_STATUS = frozenset({429, 503, 509, 529})
# The most seconds that are read: a year.
_YEAR = 365 * 86400.0
# Larger numbers are times since 1970, as Docker Hub and GitHub send them.
_LEAST_TIME = 1e9
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?", re.ASCII)
# Numbers of seconds or times, and numbers of milliseconds (Azure).
_PAUSES = ("Retry-After", "X-Retry-After")
_MILLISECONDS = ("X-MS-Retry-After-MS", "Retry-After-MS")
_RESETS = ("RateLimit-Reset", "X-RateLimit-Reset", "X-Rate-Limit-Reset")
_REMAINING = ("RateLimit-Remaining", "X-RateLimit-Remaining", "X-Rate-Limit-Remaining")
# The two forms of draft-ietf-httpapi-ratelimit-headers: remaining requests, seconds.
_LIMIT = re.compile(r"\b(?:remaining|r)=0\b.*\b(?:reset|t)=([0-9]{1,9})\b", re.ASCII)


def read_pause(headers: Mapping[str, str], timestamp: float) -> float:
    """Return the seconds until a registry accepts requests again; 0 if its headers do not say.

    Sources: RFC 9110, 10.2.3, for Retry-After; draft-ietf-httpapi-ratelimit-headers for limits, of
    which only those count that are used up.
    """
    for name in _PAUSES:
        if seconds := _parse_time(headers.get(name, ""), timestamp):
            return seconds
    for name in _MILLISECONDS:
        if _NUMBER.fullmatch(text := headers.get(name, "").strip()):
            return min(float(text) / 1000, _YEAR)
    if used_up := _LIMIT.search(headers.get("RateLimit", "")):
        return float(used_up[1])
    if any(headers.get(name, "").partition(";")[0].strip() == "0" for name in _REMAINING):
        pauses = (_parse_time(headers.get(name, ""), timestamp) for name in _RESETS)
        return next(filter(None, pauses), 0.0)
    return 0.0


def _parse_time(value: str, timestamp: float) -> float:
    """Return the seconds of a number, or until a date; 0 for an invalid one."""
    text = value.strip()
    if _NUMBER.fullmatch(text):
        number = float(text)
        seconds = number if number < _LEAST_TIME else number - timestamp
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - timestamp
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _YEAR)

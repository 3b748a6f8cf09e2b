"""URLs that a registry refuses again and again while it accepts other requests.

A quota refuses whichever request comes, so that each one succeeds sooner or later. An endpoint that
fails refuses all of its requests, and waiting for it is in vain.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from clowder_aimage.registry.pace import FORGOTTEN

# A URL is tried for these seconds, and for this number of refusals after another request succeeded.
URL_PATIENCE, ROUNDS = 30.0, 6


@dataclass(slots=True)
class UrlRefusal:
    """The refusals of one URL since its last success.

    ``rounds`` are those beside which another request succeeded; ``is_compared`` is true if the last
    one is of these.
    """

    first: float
    last: float
    # The successes of other URLs before the last refusal.
    successes: int
    rounds: int = 0
    is_compared: bool = False

    @property
    def seconds(self) -> float:
        """The time of the refusals."""
        return self.last - self.first

    @property
    def is_hopeless(self) -> bool:
        """True if the registry accepts other requests, but not this one."""
        return self.rounds >= ROUNDS and self.seconds > URL_PATIENCE


class UrlRefusals:
    """The refused URLs of one session, by kind of request. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._successes = Counter[str]()
        self._refusals: dict[tuple[str, str], UrlRefusal] = {}

    def record_success(self, kind: str, url: str) -> None:
        """Record an answer that was no refusal."""
        with self._lock:
            self._successes[kind] += 1
            self._refusals.pop((kind, url), None)

    def record_refusal(self, kind: str, url: str, timestamp: float) -> UrlRefusal:
        """Record a refusal, and return those of the URL, without ones of long ago."""
        with self._lock:
            count = self._successes[kind]
            refusal = self._refusals.get((kind, url))
            if refusal is None or timestamp - refusal.last >= FORGOTTEN:
                refusal = self._refusals[kind, url] = UrlRefusal(timestamp, timestamp, count)
            refusal.is_compared = count > refusal.successes
            refusal.rounds += refusal.is_compared
            refusal.successes, refusal.last = count, timestamp
            return refusal

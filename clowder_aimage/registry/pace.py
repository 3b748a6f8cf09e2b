"""The pace of requests to a registry that limits them.

Many registries refuse requests above a rate without saying which. Between two refusals a registry
accepts what its quota allows, so that the successes between them measure it. Requests are then
spread evenly, a little below that rate, which grows again with the time since the last refusal:
slowly at first, to stay near the quota, and faster later, to notice that it has become larger.
A registry that has refused no request has no pace.
"""

from __future__ import annotations

import math
import threading

# Seconds in which a registry may refuse all requests, before and after it accepted the first one.
FIRST_PATIENCE, PATIENCE = 10.0, 300.0
# Seconds of the first pause after a refusal, and the longest without a Retry-After.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
# Each pause after which nothing succeeds is longer by this factor.
_LONGER = 1.4
# Requests per second after the first refusal: what a registry allows is not known yet.
_FASTEST = 1000.0
# Fraction of the measured rate, so that refusals are few.
_MARGIN = 0.97
# The least fraction that remains of a rate at which several requests in a row succeeded.
_LEAST = 0.85
# The successes that measure a rate well: older ones then count half.
_ENOUGH = 10
# The rate grows by this fraction in each second, for each second since the last refusal.
_GROWTH = 0.03
# Seconds without a refusal after which a registry has no pace any more.
FORGOTTEN = 60.0
# Seconds that a late request is made up for by earlier next ones.
_SLACK = 0.005


class Pace:
    """The rate at which a registry accepts requests, shared by all threads that send them.

    All times are in seconds of one clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Requests per second at the time of the last refusal, None without refusals.
        self._rate: float | None = None
        self._refused_at = self._paused_until = self._next_at = -math.inf
        self._pause = FIRST_PAUSE
        # The successes since a time, and older ones with their seconds.
        self._successes, self._measured_from = 0, 0.0
        self._old_successes = self._old_seconds = 0.0
        # The times of the first and last refusal since the last success, by method.
        self._refused: dict[str, tuple[float, float]] = {}

    def claim(self, timestamp: float) -> float:
        """Return 0 if a request may be sent now; else the seconds after which to claim again."""
        if self._rate is None:
            return 0.0
        with self._lock:
            wait = max(self._paused_until, self._next_at) - timestamp
            if wait > 0:
                return wait
            if timestamp - self._refused_at > FORGOTTEN:
                self._rate = None
                return 0.0
            if not self._successes:
                # Others wait for the answer to the first request after a refusal
                self._next_at = timestamp + self._pause
                return 0.0
            interval = 1 / self._compute_rate(timestamp)
            self._next_at = max(self._next_at, timestamp - min(_SLACK, interval)) + interval
            return 0.0

    def record_success(self, method: str, sent_at: float) -> None:
        """Record an answer that was no refusal, to a request that was sent at a time."""
        if self._rate is None:
            return
        with self._lock:
            self._refused.pop(method, None)
            if sent_at >= self._refused_at:
                if not self._successes:
                    self._next_at = sent_at + 1 / self._rate
                self._successes += 1

    def record_refusal(
        self, method: str, sent_at: float, timestamp: float, retry_after: float = 0.0
    ) -> float:
        """Lower the rate, and pause for at least ``retry_after`` seconds.

        Return the seconds in which all requests with this method were refused. A request that was
        sent before the last refusal says nothing new.
        """
        with self._lock:
            first, last = self._refused.get(method, (timestamp, timestamp))
            first = first if timestamp - last < FORGOTTEN else timestamp
            self._refused[method] = first, timestamp
            if self._rate is None or sent_at >= self._refused_at:
                self._lower(timestamp)
            self._paused_until = max(self._paused_until, timestamp + retry_after)
            return timestamp - first

    def _lower(self, timestamp: float) -> None:
        if self._rate is None:
            self._rate, self._pause = _FASTEST, FIRST_PAUSE
            self._old_successes = self._old_seconds = 0.0
            self._measured_from = timestamp
        elif self._successes:
            self._rate = self._measure(timestamp)
            self._pause = min(max(0.6 / self._rate, FIRST_PAUSE), LONGEST_PAUSE)
            self._measured_from = timestamp
        else:
            # The registry still refuses everything: this does not measure a rate.
            self._pause = min(self._pause * _LONGER, LONGEST_PAUSE)
        self._successes = 0
        self._refused_at, self._paused_until = timestamp, timestamp + self._pause

    def _measure(self, timestamp: float) -> float:
        """Return the rate of the successes until now, which is below the current one."""
        if self._old_successes >= _ENOUGH:
            self._old_successes, self._old_seconds = self._old_successes / 2, self._old_seconds / 2
        self._old_successes += self._successes
        self._old_seconds += timestamp - self._measured_from
        measured = (self._old_successes + 1) / max(self._old_seconds, 1e-3)
        current = self._compute_rate(timestamp)
        if self._successes < _ENOUGH:
            measured = max(measured, current / 2)
        elif measured > current / 2:
            measured = max(measured, _LEAST * current)
        return min(measured, current) * _MARGIN

    def _compute_rate(self, timestamp: float) -> float:
        age = max(timestamp - self._refused_at, 0.0)
        return (self._rate or _FASTEST) * math.exp(min(_GROWTH * age * age / 2, 30))


class Paces:
    """The paces of registries, by host."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}

    def get(self, host: str) -> Pace:
        """Return the pace of a registry; a new one has no limit."""
        return self._paces.setdefault(host, Pace())

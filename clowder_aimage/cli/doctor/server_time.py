"""The times of servers, compared with the clock of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class Skew:
    """The seconds by which the clock of a server is ahead of that of this machine."""

    server: str
    seconds: float


class ServerTimes:
    """Collects the skews of servers. Thread-safe. ``clock`` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._skews: dict[str, float] = {}

    def record(self, server: str, seconds: float) -> None:
        """Record the skew of a server."""
        with self._lock:
            self._skews[server] = seconds

    def observe(self, server: str, headers: Mapping[str, str]) -> None:
        """Record the skew by the headers of a response that has just arrived (RFC 9110, 6.6.1)."""
        fields = {name.lower(): value for name, value in headers.items()}
        # A cache states the time of the origin at an earlier response.
        if "date" not in fields or fields.get("age", "0") != "0":
            return
        try:
            date = parsedate_to_datetime(fields["date"]).timestamp()
        except (ValueError, TypeError, OverflowError):
            return
        self.record(server, date - self._clock())

    def list_skews(self) -> list[Skew]:
        """Return the skews by server."""
        with self._lock:
            return [Skew(server, seconds) for server, seconds in sorted(self._skews.items())]

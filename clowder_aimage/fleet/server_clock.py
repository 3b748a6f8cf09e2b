"""The time of the NATS server, which is that of all programs of a fleet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

# Seconds that the message may be old whose time is read.
AGE = 15.0
# Seconds of a difference that is not reported.
_TOLERATED = 5.0
_log = logging.getLogger("aimage.fleet")


class ServerClock:
    """Estimates the time of the server from the times at which it stored messages.

    A message that was stored at most AGE seconds ago was stored at a time of the server that is
    that much before its present time. The clock of this machine is taken as right if that is
    possible: then programs with right clocks agree to the millisecond.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._offset = 0.0

    def observe(self, stored_at: float) -> None:
        """Take the time at which the server stored a message in the last AGE seconds."""
        difference = stored_at - self._clock()
        is_right = -AGE - _TOLERATED <= difference <= _TOLERATED
        offset = 0.0 if is_right else difference
        if abs(offset - self._offset) > AGE + _TOLERATED:
            text = "the clock of this machine differs from that of NATS"
            if offset:
                _log.warning(text, extra={"seconds": round(offset)})
        self._offset = offset

    @property
    def offset(self) -> float:
        """The seconds by which the server's clock is ahead; 0 if this machine's may be right."""
        return self._offset

    def now(self) -> float:
        """Return the time of the server in seconds of the epoch."""
        return self._clock() + self._offset

"""A response of http.client whose reads end at a deadline.

The timeout of a socket limits each read alone: a peer that sends a byte now and then exceeds none.
The deadline covers status line, interim responses, headers, chunk extensions, trailers and bodies.
"""

from __future__ import annotations

import http.client
import io
import math
import time
from typing import Any


class OverdueError(TimeoutError):
    """A response did not arrive completely before its deadline."""


class TimedReader(io.RawIOBase):
    """The bytes of a socket until a deadline. The first deadline is the timeout of the socket."""

    def __init__(self, raw: io.RawIOBase, sock: Any) -> None:
        self._raw, self._sock = raw, sock
        timeout: float | None = sock.gettimeout()
        # Seconds of each read.
        self.timeout = math.inf if timeout is None else timeout
        self.allow(self.timeout)

    def allow(self, seconds: float, *, is_partial: bool = False) -> None:
        """Set the deadline; with ``is_partial``, a read then returns the bytes that arrived."""
        self._until, self._is_partial = time.monotonic() + seconds, is_partial
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read, as RawIOBase; return None at a partial deadline."""
        # None makes io.BufferedReader return the bytes that it has.
        remaining = self._until - time.monotonic()
        has_part = self._is_partial and self._count > 0
        if remaining <= 0 and not self._is_partial:
            raise OverdueError("timed out")
        if remaining <= 0 and has_part:
            return None
        if remaining < self.timeout and not self._is_partial:
            self._sock.settimeout(remaining)
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            if has_part:
                # The next read fails
                return None
            if self._is_partial or remaining >= self.timeout:
                raise
            raise OverdueError("timed out") from None
        self._count += count or 0
        return count

    def close(self) -> None:
        super().close()
        self._raw.close()


class TimedResponse(http.client.HTTPResponse):
    """A response whose status line and headers arrive within the timeout of the socket.

    The reader of its body sets the time for that by ``allow``: without that it is short.
    """

    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timed = TimedReader(self.fp.detach(), sock)
        self.allow, self.timeout = self._timed.allow, self._timed.timeout
        self.fp = io.BufferedReader(self._timed)

"""A response of http.client whose reads end at a deadline.

The timeout of a socket limits each read alone: a peer that sends a byte now and then exceeds none.
The deadline covers status line, interim responses, headers, chunk extensions, trailers and bodies.
"""

from __future__ import annotations

import http.client
import io
import math
import re
import time
from typing import Any

# A final response of HTTP/1.1 with headers in ASCII, none of them folded (RFC 9112, 2.1).
_PLAIN_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9]{2}) ([\t -~]*)\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)*)\r\n"
)
# The limit of http.client.
_MAX_HEADERS = 100


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

    # None before the head is read.
    headers: Any
    # The headers of a plain head.
    pairs: list[tuple[str, str]] | None = None
    _method: str

    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timed = TimedReader(self.fp.detach(), sock)
        self.allow, self.timeout = self._timed.allow, self._timed.timeout
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read the status line and headers.

        http.client parses headers like those of a mail, which takes longer than all else of a small
        response. So it parses only heads that are unusual or that arrive in several parts.
        """
        if self.headers is None and not self._begin_plain():
            super().begin()

    def _begin_plain(self) -> bool:
        """Read a plain head with a declared length; else read nothing, and return False."""
        head = _PLAIN_HEAD.match(self.fp.peek(1))
        if head is None:
            return False
        lines = head[3].decode("ascii").split("\r\n")[:-1]
        message, names, pairs = http.client.HTTPMessage(), list[str](), list[tuple[str, str]]()
        for line in lines:
            name, _, value = line.partition(":")
            pairs.append((name, value := value.lstrip(" \t")))
            message.set_raw(name, value)
            names.append(name.lower())
        length, status = message.get("content-length", ""), int(head[1])
        has_length = names.count("content-length") == 1 and length.isdigit() and len(length) < 19
        is_kept = message.get("connection", "keep-alive").lower() == "keep-alive"
        if not has_length or not is_kept or "transfer-encoding" in names:
            return False
        if len(names) > _MAX_HEADERS or names.count("connection") > 1:
            return False
        self.fp.read(head.end())
        self.headers, self.pairs = message, pairs
        self.msg = message
        self.code = self.status = status
        self.reason, self.version = head[2].decode("ascii").strip(), 11
        self.chunked = self.will_close = False
        # Whatever the headers say (RFC 9112, 6.3).
        has_body = self._method != "HEAD" and status not in (204, 304)
        self.length = int(length) if has_body else 0
        return True

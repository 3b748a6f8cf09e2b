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
from typing import Any, NamedTuple

# A final response of HTTP/1.1 with headers in ASCII, none of them folded (RFC 9112, 2.1).
_PLAIN_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9]{2}) ([\t -~]*)\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)*)\r\n"
)
# The limit of http.client.
_MAX_HEADERS = 100
# Digits of a length that are too many.
_MAX_LENGTH = 19


class ResponseHead(NamedTuple):
    """A plain head. ``length`` is that of the body in bytes, ``size`` that of the head itself."""

    status: int
    reason: str
    pairs: list[tuple[str, str]]
    length: int
    size: int


def parse_head(data: bytes, method: str) -> ResponseHead | None:
    """Parse a plain head with a declared length, at the beginning of a response to ``method``.

    Return None for an incomplete or another one: http.client then parses it.
    """
    match = _PLAIN_HEAD.match(data)
    if match is None:
        return None
    lines = match[3].decode("ascii").split("\r\n")[:-1]
    if len(lines) > _MAX_HEADERS:
        return None
    pairs: list[tuple[str, str]] = []
    length = connection = None
    for line in lines:
        name, _, value = line.partition(":")
        value = value.lstrip(" \t")
        pairs.append((name, value))
        lowered = name.lower()
        if lowered == "content-length":
            if length is not None:
                return None
            length = value
        elif lowered == "connection":
            if connection is not None or value.lower() != "keep-alive":
                return None
            connection = value
        elif lowered == "transfer-encoding":
            return None
    if length is None or not length.isdigit() or len(length) >= _MAX_LENGTH:
        return None
    status = int(match[1])
    # Whatever the headers say (RFC 9112, 6.3).
    has_body = method != "HEAD" and status not in (204, 304)
    reason = match[2].decode("ascii").strip()
    return ResponseHead(status, reason, pairs, int(length) if has_body else 0, match.end())


class OverdueError(TimeoutError):
    """A response did not arrive completely before its deadline."""


class TimedReader(io.RawIOBase):
    """The bytes of a socket until a deadline. The first deadline is the timeout of the socket.

    ``received`` are the first bytes, which were read before, ``since`` the time of the request.
    """

    def __init__(
        self, raw: io.RawIOBase, sock: Any, received: bytes = b"", since: float | None = None
    ) -> None:
        self._raw, self._sock = raw, sock
        self._received = memoryview(received)
        timeout: float | None = sock.gettimeout()
        # Seconds of each read.
        self.timeout = math.inf if timeout is None else timeout
        self.allow(self.timeout)
        if since is not None:
            self._until = since + self.timeout

    def allow(self, seconds: float, *, is_partial: bool = False) -> None:
        """Set the deadline; with ``is_partial``, a read then returns the bytes that arrived."""
        self._until, self._is_partial = time.monotonic() + seconds, is_partial
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read, as RawIOBase; return None at a partial deadline."""
        if self._received:
            count = min(len(buffer), len(self._received))
            buffer[:count], self._received = self._received[:count], self._received[count:]
            self._count += count
            return count
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

    def __init__(
        self,
        sock: Any,
        *args: Any,
        received: bytes = b"",
        since: float | None = None,
        head: ResponseHead | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin a response; ``received`` are its first bytes, without a ``head`` that is parsed."""
        super().__init__(sock, *args, **kwargs)
        self._head = head
        self._timed = TimedReader(self.fp.detach(), sock, received, since)
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
        head = self._head
        if head is None:
            if (head := parse_head(self.fp.peek(1), self._method)) is None:
                return False
            self.fp.read(head.size)
        message = http.client.HTTPMessage()
        for name, value in head.pairs:
            message.set_raw(name, value)
        self.headers, self.pairs = message, head.pairs
        self.msg = message
        self.code = self.status = head.status
        self.reason, self.version = head.reason, 11
        self.chunked = self.will_close = False
        self.length = head.length
        return True

"""Connections that send plain requests at once, and pools of them.

urllib3 opens the connections, and takes longer to prepare a request than the system takes to send
it. So it sends only the first request of a connection, and those that are not plain.
"""

from __future__ import annotations

import errno
import math
import os
import queue
import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import urllib3
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import ProtocolError, ReadTimeoutError, SSLError
from urllib3.util.wait import wait_for_write

from clowder_aimage.content.store import FileStream, Reader
from clowder_aimage.content.timed_response import OverdueError, TimedResponse, parse_head
from clowder_aimage.registry.reach import Boundary

_BLOCK = 1024 * 1024
# Of sendfile(2): some files of FUSE and of old kernels.
_NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EOVERFLOW}
# Seconds for _STEP bytes: the registry may be storing received bytes.
SEND_TIMEOUT = 60.0
_STEP = 128 * 1024
# Bytes of the first read of a response.
_FIRST_READ = 8192
_NO_RETRY = urllib3.Retry(False)
# A request line for a path, and headers in ASCII.
_PLAIN_REQUEST = re.compile(
    r"[A-Z]+ [!-~]+ HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t -~]*\r\n)+\r\n"
)
# A line break within a header (RFC 9112, 5.2).
_FOLD = re.compile(r"\r?\n[ \t]*")
TLS_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
# The kernel sends these bytes together with the next ones, on Linux.
_MORE = getattr(socket, "MSG_MORE", 0)
# Errors after which a response may still have arrived.
_SENDING_ENDED = {errno.EPIPE, errno.ECONNRESET, errno.EPROTOTYPE}


@dataclass(slots=True, eq=False)
class StreamBody:
    """``size`` bytes of a stream, at ``offset``, as the body of a request.

    Without TLS the kernel sends a FileStream. Other streams are read in blocks; if the stream must
    end with the body (``last``), the last block is sent once that is verified.
    """

    stream: Reader
    offset: int
    size: int
    last: bool

    def send_to(self, sock: socket.socket) -> None:
        """Write the bytes to a socket. Raises OSError and the errors of the stream."""
        if type(sock) is socket.socket and isinstance(self.stream, FileStream):
            self._send_file(sock, self.stream)
            return
        remaining = self.size
        buffer = memoryview(bytearray(min(remaining, _BLOCK)))
        while remaining:
            block = buffer[: self.stream.readinto(buffer[:remaining])]
            remaining -= len(block)
            if not block or (self.last and not remaining and self.stream.read(1)):
                raise EOFError("the body does not match its declared length")
            for start in range(0, len(block), _STEP):
                # Each block is sent within the timeout of the socket.
                sock.sendall(block[start : start + _STEP])

    def _send_file(self, sock: socket.socket, stream: FileStream) -> None:
        file, offset, end = stream.fileno(), self.offset, self.offset + self.size
        # The offset that must be exceeded by the deadline.
        next_offset, deadline = offset, 0.0
        while offset < end:
            if offset >= next_offset:
                next_offset = offset + _STEP
                deadline = time.monotonic() + (sock.gettimeout() or math.inf)
            try:
                count = os.sendfile(sock.fileno(), file, offset, min(end - offset, _BLOCK))
            except BlockingIOError:
                # A socket with a timeout does not block in the kernel.
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not wait_for_write(
                    sock, None if remaining == math.inf else remaining
                ):
                    raise TimeoutError("timed out while sending the body") from None
                continue
            except OSError as error:
                if error.errno not in _NO_SENDFILE:
                    raise
                # The file system of the store cannot be read by the kernel like that.
                sock.sendall(block := os.pread(file, min(end - offset, _STEP), offset))
                count = len(block)
            if not count:
                raise EOFError("the body does not match its declared length")
            offset += count
            stream.record_sent(count)


# The addresses to connect to, by host and port.
Addresses = Mapping[tuple[str, int], str]


class ResponseHeaders(Mapping[str, str]):
    """Headers by their names in any case; the values of a repeated one are joined.

    urllib3's own dictionary takes longer than all else of a response without a body.
    """

    __slots__ = ("_fields",)

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        fields: dict[str, tuple[str, str]] = {}
        for name, value in pairs:
            lowered = name.lower()
            if lowered in fields:
                name, first = fields[lowered]
                value = f"{first}, {value}"
            fields[lowered] = name, value
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()][1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._fields.values())

    def __len__(self) -> int:
        return len(self._fields)


class BodilessResponse:
    """A response without a body. Its connection is idle again."""

    connection = None
    closed = True

    def __init__(self, status: int, headers: ResponseHeaders) -> None:
        self.status, self.headers = status, headers

    def read(self, _: int | None = None) -> bytes:
        return b""

    def readinto(self, _: memoryview) -> int:
        return 0

    def isclosed(self) -> bool:
        return True

    def release_conn(self) -> None:
        pass

    def close(self) -> None:
        pass


class _PlainConnection:
    """A connection of urllib3 that sends StreamBody, and keeps its timed response."""

    response: TimedResponse | None = None
    addresses: Addresses = {}  # noqa: RUF012 - read only
    boundary: Boundary | None = None
    # Method of a request that this class has sent, until its response.
    _sent: str | None = None

    def _new_conn(self) -> socket.socket:
        """Connect to the address that is set for the host; TLS and headers keep its name."""
        host: str = self.host  # type: ignore[has-type]
        self.host = self.addresses.get((host.lower(), self.port), host)  # type: ignore[attr-defined]
        try:
            sock: socket.socket = super()._new_conn()  # type: ignore[misc]
        finally:
            self.host = host
        if self.boundary is not None:
            try:
                self.boundary.check(host, sock)
            except BaseException:
                sock.close()
                raise
        return sock

    def request(
        self,
        method: str,
        url: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Send a plain request at once; urllib3 sends others, header by header."""
        self._sent = None
        head = self.build_head(method, url, headers or {})
        if head is None or not isinstance(body, bytes | list | None):
            super().request(method, url, body=body, headers=headers, **options)  # type: ignore[misc]
            return
        # urllib3 reads a response that arrived although the body could not be sent.
        self._sent = method
        self.send(head)
        for block in [body] if isinstance(body, bytes) else body or ():
            self.send(block)

    def build_head(self, method: str, url: str, headers: Mapping[str, str]) -> bytes | None:
        """Return the request line and headers; None for a request that is not plain."""
        host, port = self.host, self.port  # type: ignore[attr-defined]
        if self._tunnel_host or ":" in host:  # type: ignore[attr-defined]
            return None
        if port != self.default_port:  # type: ignore[attr-defined]
            host = f"{host}:{port}"
        lines = [f"{method} {url} HTTP/1.1", f"Host: {host}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""])
        names = {name.lower() for name in headers}
        needed = {"accept-encoding", "user-agent"}
        if method not in ("GET", "HEAD"):
            needed.add("content-length")
        is_usual = needed <= names and names.isdisjoint(("host", "transfer-encoding"))
        is_plain = is_usual and "/" in url[:1] and _PLAIN_REQUEST.fullmatch(head) is not None
        # A value with a line break would be another header.
        return head.encode("ascii") if is_plain and head.count("\n") == len(lines) + 1 else None

    def send_plain(self, head: bytes, body: Any) -> None:
        """Send a request over the open connection. Raises OSError and the errors of the body."""
        sock: socket.socket = self.sock  # type: ignore[attr-defined]
        try:
            if not isinstance(body, StreamBody):
                self.send(head + body if body else head)
                return
            if _MORE and type(sock) is socket.socket:
                _set_timeout(sock, SEND_TIMEOUT)
                sock.sendall(head, _MORE)
            else:
                self.send(head)
            self.send(body)
        except OSError as error:
            # A response may have arrived early.
            if error.errno not in _SENDING_ENDED:
                raise

    def receive_plain(
        self, method: str, timeout: float, pool: HTTPConnectionPool | None
    ) -> BodilessResponse | urllib3.HTTPResponse:
        """Return the response to ``method``; its connection is returned to ``pool``.

        The connection of a response without a body is ready for the next request at once.
        """
        sock: Any = self.sock  # type: ignore[attr-defined]
        _set_timeout(sock, timeout)
        started = time.monotonic()
        try:
            data: bytes = sock.recv(_FIRST_READ)
        except TimeoutError:
            raise OverdueError("timed out") from None
        head = parse_head(data, method)
        if pool is not None and head is not None and not head.length and head.size == len(data):
            return BodilessResponse(head.status, ResponseHeaders(head.pairs))
        rest = data if head is None else data[head.size :]
        response = self.response_class(sock, method=method, received=rest, since=started, head=head)
        try:
            response.begin()
        except BaseException as error:
            response.close()
            if isinstance(error, ConnectionError):
                self.close()  # type: ignore[attr-defined]
            raise
        if response.will_close:
            # The response keeps the socket.
            self.close()  # type: ignore[attr-defined]
        pairs = response.pairs
        if pairs is None:
            pairs = [(name, _FOLD.sub(" ", value)) for name, value in response.headers.items()]
        connection: Any = None if pool is None else self
        return urllib3.HTTPResponse(
            response,
            urllib3.HTTPHeaderDict(pairs),
            response.status,
            version=response.version,
            reason=response.reason,
            preload_content=False,
            decode_content=False,
            original_response=response,
            pool=pool,
            connection=connection,
            request_method=method,
        )

    def getresponse(self) -> Any:
        """Return the response to a request, as urllib3 does."""
        if self._sent is None:
            return super().getresponse()  # type: ignore[misc]
        method, self._sent = self._sent, None
        return self.receive_plain(method, self.timeout, None)  # type: ignore[attr-defined]

    def response_class(self, *args: Any, **kwargs: Any) -> TimedResponse:
        self.response = TimedResponse(*args, **kwargs)
        return self.response

    def send(self, data: Any) -> None:
        sock: socket.socket | None = self.sock  # type: ignore[attr-defined]
        # This replaces the connect timeout. The response sets its own.
        if sock is not None:
            _set_timeout(sock, SEND_TIMEOUT)
        try:
            if sock is None:
                super().send(data)  # type: ignore[misc]
            elif isinstance(data, StreamBody):
                data.send_to(sock)
            else:
                sock.sendall(data)
        except TLS_ENDED as error:
            # As without TLS: urllib3 then reads a response or an alert that arrived early
            raise BrokenPipeError(errno.EPIPE, str(error)) from error


def _set_timeout(sock: socket.socket, seconds: float) -> None:
    """Set the timeout of a socket, which is a system call, unless it is that already."""
    if sock.gettimeout() != seconds:
        sock.settimeout(seconds)


class _PlainPool:
    """A pool whose idle connections send plain requests; urllib3 sends the others."""

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | StreamBody | None,
        timeout: urllib3.Timeout,
    ) -> Any:
        """Send a request, without redirects, and return its response with the body unread.

        Raises the errors of ``urlopen``, and those of the body.
        """
        connection = self._take_idle()
        head = connection.build_head(method, url, headers) if connection is not None else None
        pool: Any = self
        if connection is None or head is None:
            if connection is not None:
                self._put_back(connection)
            return pool.urlopen(
                method,
                url,
                body=[body] if isinstance(body, StreamBody) else body,
                headers=headers,
                redirect=False,
                assert_same_host=False,
                preload_content=False,
                decode_content=False,
                retries=_NO_RETRY,
                timeout=timeout,
            )
        seconds: Any = timeout.read_timeout
        try:
            connection.send_plain(head, body)
            try:
                response = connection.receive_plain(method, seconds, pool)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    message = f"Read timed out. (read timeout={seconds})"
                    raise ReadTimeoutError(pool, url, message) from error
                raise
        except BaseException as error:
            connection.close()
            self._put_back(connection)
            if isinstance(error, ssl.SSLError):
                raise SSLError(error) from error
            if isinstance(error, OSError | HTTPException):
                raise ProtocolError("Connection aborted.", error) from error
            raise
        if isinstance(response, BodilessResponse):
            self._put_back(connection)
        return response

    def _take_idle(self) -> Any:
        """Remove an open connection from the pool, if there is one without a proxy."""
        pool: Any = self
        if pool.proxy is not None or pool.pool is None:
            return None
        try:
            connection = pool.pool.get(block=False)
        except (AttributeError, queue.Empty):
            # Another thread may have closed the pool.
            return None
        if connection is not None and connection.is_connected:
            return connection
        self._put_back(connection)
        return None

    def _put_back(self, connection: Any) -> None:
        pool: Any = self
        pool._put_conn(connection)  # noqa: SLF001 - of a base class


def _build_pool_class(
    kind: type[HTTPConnectionPool], addresses: Addresses, boundary: Boundary | None
) -> type[HTTPConnectionPool]:
    fields = {"addresses": addresses, "boundary": boundary}
    connection = type("Connection", (_PlainConnection, kind.ConnectionCls), fields)
    return type(kind.__name__, (_PlainPool, kind), {"ConnectionCls": connection})


def set_pools(
    pools: urllib3.PoolManager, addresses: Addresses | None = None, boundary: Boundary | None = None
) -> None:
    """Let the connections of ``pools`` send StreamBody, and time their responses.

    All requests use such pools, and so have a deadline; each new connection is checked with
    ``boundary``.
    """
    kinds = pools.pool_classes_by_scheme
    pools.pool_classes_by_scheme = {
        scheme: _build_pool_class(kind, addresses or {}, boundary) for scheme, kind in kinds.items()
    }

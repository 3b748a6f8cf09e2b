"""Requests to other nodes: the distribution API with the nodes' own token.

No docker config, netrc, proxy, redirect or cookie takes part: a request carries the token of the
nodes and goes to the address that it is meant for. Answers are bounded in size and in time.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import urllib3
from urllib3.exceptions import HTTPError, ProtocolError
from urllib3.exceptions import TimeoutError as HTTPTimeoutError

from clowder_aimage.errors import NetworkError
from clowder_aimage.oci import Digest, Reference

# In a request: the node that asks. In an answer: the node that answers, or, with a redirect, those
# that have the content.
NODE_HEADER = "Aimage-Node"
NODE_ID = re.compile(r"[0-9a-f]{32}")
BUSY = 429
STORED = "only-if-cached"  # Cache-Control of a request (RFC 9111, 5.2.1.7)
MAX_NODES = 16  # of one redirect
_MAX_BODY = 16 * 1024  # bytes of an answer that is not a range
_CONNECTIONS = 16  # to one node that are kept
_POOLS = 4096  # nodes whose connections are kept
_CONNECT_TIMEOUT = 2.0  # seconds


class PeerError(NetworkError):
    """A node that gave no valid answer; ``is_late`` if it took too long for one."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


@dataclass(frozen=True, slots=True, order=True)
class PeerAddress:
    """The address on which a node listens."""

    host: str
    port: int
    is_secure: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BlobSpan:
    """Bytes [start, end) of a blob in a repository of a registry."""

    reference: Reference
    digest: Digest
    start: int
    end: int

    @property
    def path(self) -> str:
        """The path of a request for the blob (distribution-spec, end-2; containerd's ``ns``)."""
        query = urlencode({"ns": self.reference.registry or ""})
        return f"/v2/{self.reference.repository}/blobs/{self.digest}?{query}"


@dataclass(frozen=True, slots=True)
class PeerRefusal:
    """An answer without content. ``nodes`` are the ids of nodes that have it."""

    status: int
    nodes: tuple[str, ...] = ()
    is_coming: bool = False

    @property
    def is_busy(self) -> bool:
        """True if the same request may succeed later."""
        return self.status in (BUSY, 307)


@dataclass(frozen=True, slots=True)
class PeerTimeouts:
    """Seconds for a ping, for all bytes of a range, and until the next byte of it."""

    ping: float = 3.0
    range: float = 90.0
    stall: float = 15.0


def addresses_of(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host name. Raises OSError or UnicodeError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(each[4][0]) for each in found})


class PeerReader(io.RawIOBase):
    """The content of an answer: ``count`` bytes, not verified.

    ``on_end`` is called with the error that ended it, or with None when all of it came.
    """

    def __init__(
        self, address: PeerAddress, response: urllib3.BaseHTTPResponse, count: int, limit: float
    ) -> None:
        self._address, self._response = address, response
        self._left, self._limit, self._waited = count, limit, 0.0
        self.on_end: Callable[[PeerError | None], object] = lambda _: None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: self._left]
        if not view:
            return 0
        try:
            data = self._read(len(view))
        except PeerError as error:
            self.on_end(error)
            raise
        view[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def _read(self, count: int) -> bytes:
        began = time.monotonic()
        with _errors(self._address):
            data = self._response.read1(count)
        self._waited += time.monotonic() - began
        if not data:
            raise PeerError(f"the answer of the peer {self._address} broke off")
        if self._waited > self._limit:
            raise PeerError(f"the peer {self._address} is too slow", is_late=True)
        return data

    def close(self) -> None:
        if not self.closed and self._left:
            self._response.close()
        elif not self.closed:
            self._response.drain_conn()
            self._response.release_conn()
            self.on_end(None)
        super().close()


class PeerClient:
    """A client of other nodes. Threads may share it.

    ``node`` is the id of this node, ``token`` the token that the nodes share, ``ca_file`` the
    authorities of those that speak TLS, if they are not the usual ones.
    """

    def __init__(
        self,
        node: str,
        token: str | None,
        *,
        ca_file: Path | None = None,
        timeouts: PeerTimeouts | None = None,
    ) -> None:
        self._headers = {
            "Accept-Encoding": "identity",
            "User-Agent": "aimage",
            NODE_HEADER: node,
        }
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeouts = timeouts or PeerTimeouts()
        self._pools = urllib3.PoolManager(
            _POOLS,
            maxsize=_CONNECTIONS,
            cert_reqs="CERT_REQUIRED",
            ca_certs=str(ca_file) if ca_file else None,
        )
        self._is_closed = False

    def close(self) -> None:
        """Close idle connections, and send no more requests."""
        self._is_closed = True
        self._pools.clear()

    def ping(self, address: PeerAddress) -> str:
        """Return the id of the node at ``address``. Raises PeerError."""
        timeout = self._timeouts.ping
        response = self._send("GET", address, "/v2/", {}, timeout)
        _finish(response)
        node = response.headers.get(NODE_HEADER, "")
        if response.status in (401, 403):
            raise PeerError(f"the peer {address} refuses the token")
        if response.status != 200 or not NODE_ID.fullmatch(node):
            raise PeerError(f"{address} is not a node: it answers {response.status}")
        return node

    def open(
        self, address: PeerAddress, span: BlobSpan, *, is_stored: bool = False
    ) -> PeerReader | PeerRefusal:
        """Request content; with ``is_stored`` only what the node has, or is receiving.

        Raises:
            PeerError: there is no answer, or none that a node gives.
        """
        headers = {"Range": f"bytes={span.start}-{span.end - 1}"}
        if is_stored:
            headers["Cache-Control"] = STORED
        response = self._send("GET", address, span.path, headers, self._timeouts.stall)
        if response.status == 206:
            if not _is_range(response, span):
                response.close()
                raise PeerError(f"the peer {address} sends another range")
            count = span.end - span.start
            return PeerReader(address, response, count, self._timeouts.range)
        _finish(response)
        if response.status not in (307, 404, BUSY, 502):
            raise PeerError(f"the peer {address} answers {response.status}")
        nodes = response.headers.get(NODE_HEADER, "").replace(" ", "").split(",")[:MAX_NODES]
        return PeerRefusal(
            response.status,
            tuple(filter(NODE_ID.fullmatch, nodes)),
            "Retry-After" in response.headers,
        )

    def has(self, address: PeerAddress, span: BlobSpan) -> bool:
        """Return True if a node has content, or is receiving it from a registry.

        Raises:
            PeerError: as ``open``.
        """
        headers = {"Range": f"bytes={span.start}-{span.end - 1}", "Cache-Control": STORED}
        response = self._send("HEAD", address, span.path, headers, self._timeouts.ping)
        _finish(response)
        return response.status == 200

    def _send(
        self, method: str, address: PeerAddress, path: str, headers: dict[str, str], limit: float
    ) -> urllib3.BaseHTTPResponse:
        if self._is_closed:
            raise PeerError("this node is shutting down")
        timeout = urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=limit)

        def send() -> urllib3.BaseHTTPResponse:
            return self._pools.request(
                method, f"{address}{path}",
                headers=self._headers | headers, timeout=timeout,
                preload_content=False, redirect=False, retries=False,
            )  # fmt: skip

        with _errors(address):
            try:
                return send()
            except ProtocolError:  # the connection was kept for too long
                return send()


@contextlib.contextmanager
def _errors(address: PeerAddress) -> Iterator[None]:
    """Raise the errors of urllib3 as PeerError."""
    try:
        yield
    except HTTPTimeoutError as error:
        raise PeerError(f"the peer {address} does not answer in time", is_late=True) from error
    except (HTTPError, OSError, ValueError) as error:
        raise PeerError(f"cannot reach the peer {address}: {error}") from error


def _is_range(response: urllib3.BaseHTTPResponse, span: BlobSpan) -> bool:
    """Return True if a 206 announces the bytes of ``span``, and only these."""
    headers = response.headers
    content_range = f"bytes {span.start}-{span.end - 1}/"
    is_coded = "Transfer-Encoding" in headers or "Content-Encoding" in headers
    is_as_long = headers.get("Content-Length") == str(span.end - span.start)
    is_at = headers.get("Content-Range", "").startswith(content_range)
    return is_as_long and is_at and not is_coded


def _finish(response: urllib3.BaseHTTPResponse) -> None:
    """Read the small body of an answer, so that its connection can be used again."""
    with contextlib.suppress(HTTPError, OSError):
        response.read(_MAX_BODY)
        if response.read(1):
            response.close()
        response.release_conn()

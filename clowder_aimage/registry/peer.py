"""Requests to other nodes: the distribution API with the nodes' own token.

Docker's config, netrc, proxies, redirects and cookies are not used: a request has the token of the
nodes, and is sent directly to its address. Responses are bounded in size and time.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import urllib3
from urllib3.exceptions import HTTPError, ProtocolError
from urllib3.exceptions import TimeoutError as HTTPTimeoutError

from clowder_aimage.content.verified_reader import RawReader
from clowder_aimage.errors import NetworkError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry.connection import set_pools
from clowder_aimage.registry.response import RegistryResponse

# In a request: the node that sends it. In a response: the node that sends it or, with a redirect,
# the nodes that have the content.
NODE_HEADER = "Aimage-Node"
NODE_ID = re.compile(r"[0-9a-f]{32}")
BUSY = 429
# The Cache-Control of a request that starts no fetch (RFC 9111, 5.2.1.7).
STORED = "only-if-cached"
# Nodes in one redirect.
MAX_NODES = 16
# Connections kept per node.
_CONNECTIONS = 16
# Nodes whose connections are kept.
_POOLS = 4096
_CONNECT_TIMEOUT = 2.0  # seconds


class PeerError(NetworkError):
    """A node did not send a valid response; ``is_late`` if it timed out."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class PeerRange:
    """The requested bytes [start, end) of a blob in a repository of a registry."""

    reference: Reference
    content: Descriptor
    start: int
    end: int

    @property
    def path(self) -> str:
        """The path of a request for the blob (distribution-spec, end-2; containerd's ``ns``).

        It states the size, so that no node has to ask the registry for it.
        """
        query = urlencode({"ns": self.reference.registry or "", "size": self.content.size})
        return f"/v2/{self.reference.repository}/blobs/{self.content.digest}?{query}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request for the bytes."""
        return {"Range": f"bytes={self.start}-{self.end - 1}"}


@dataclass(frozen=True, slots=True)
class PeerRefusal:
    """A response without content. ``nodes`` are the ids of nodes that have it."""

    status: int
    nodes: tuple[str, ...] = ()
    is_coming: bool = False

    @property
    def is_busy(self) -> bool:
        """True if the same request may succeed later."""
        return self.status in (BUSY, 307)


@dataclass(frozen=True, slots=True)
class PeerTimeouts:
    """Timeouts in seconds: for a ping, for a whole range, and for its next byte."""

    ping: float = 3.0
    range: float = 300.0
    stall: float = 15.0


def resolve_addresses(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host name. Raises OSError or UnicodeError."""
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(result[4][0]) for result in results})


class PeerReader(RawReader):
    """The content of a response: ``count`` bytes, not verified.

    ``on_end`` is called with the error that ended it, or with None if it is complete.
    """

    def __init__(self, peer: str, response: RegistryResponse, count: int, limit: float) -> None:
        self._peer, self._response = peer, response
        self._left, self._limit, self._waited = count, limit, 0.0
        self.on_end: Callable[[PeerError | None], object] = lambda _: None

    def _fill(self, view: memoryview) -> int:
        view = view[: self._left]
        if not view:
            return 0
        try:
            count = self._read(view)
        except PeerError as error:
            self.on_end(error)
            raise
        self._left -= count
        return count

    def _read(self, view: memoryview) -> int:
        started = time.monotonic()
        with _translate_errors(self._peer):
            count = self._response.readinto(view)
        self._waited += time.monotonic() - started
        if not count:
            raise PeerError(f"the response of peer {self._peer} ended early")
        if self._waited > self._limit:
            raise PeerError(f"peer {self._peer} is too slow", is_late=True)
        return count

    def close(self) -> None:
        if not self.closed and self._left:
            self._response.close()
        elif not self.closed:
            self._response.release()
            self.on_end(None)
        super().close()


class PeerClient:
    """A client of other nodes, addressed by URL. Thread-safe.

    ``node`` is the id of this node, ``token`` the token that the nodes share, ``ca_file`` the
    certificate authorities for nodes with TLS, if not the default ones.
    """

    def __init__(
        self,
        node: str,
        token: str | None,
        *,
        ca_file: Path | None = None,
        timeouts: PeerTimeouts | None = None,
    ) -> None:
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "aimage", NODE_HEADER: node}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeouts = timeouts or PeerTimeouts()
        self._pools = urllib3.PoolManager(
            _POOLS,
            maxsize=_CONNECTIONS,
            cert_reqs="CERT_REQUIRED",
            ca_certs=str(ca_file) if ca_file else None,
        )
        set_pools(self._pools)
        self._is_closed = False

    def close(self) -> None:
        """Close idle connections, and send no more requests."""
        self._is_closed = True
        self._pools.clear()

    def ping(self, peer: str) -> str:
        """Return the id of a node. Raises PeerError."""
        response = self._send("GET", peer, "/v2/", {}, self._timeouts.ping)
        response.finish()
        node = response.headers.get(NODE_HEADER, "")
        if response.status_code in (401, 403):
            raise PeerError(f"peer {peer} rejected the token")
        if response.status_code != 200 or not NODE_ID.fullmatch(node):
            raise PeerError(f"{peer} is not a node: GET /v2/ returned {response.status_code}")
        return node

    def open(
        self, peer: str, span: PeerRange, *, is_stored: bool = False
    ) -> PeerReader | PeerRefusal:
        """Request content; ``is_stored`` excludes a fetch by the other node. Raises PeerError."""
        headers = span.headers | ({"Cache-Control": STORED} if is_stored else {})
        response = self._send("GET", peer, span.path, headers, self._timeouts.stall)
        if response.status_code == 206:
            if not _is_range(response.headers, span):
                response.close()
                raise PeerError(f"peer {peer} sent another range")
            return PeerReader(peer, response, span.end - span.start, self._timeouts.range)
        response.finish()
        # 403: the policy of that node does not accept the content
        if response.status_code not in (307, 403, 404, BUSY, 502):
            raise PeerError(f"peer {peer} answered {response.status_code}")
        nodes = response.headers.get(NODE_HEADER, "").replace(" ", "").split(",")[:MAX_NODES]
        return PeerRefusal(
            response.status_code,
            tuple(filter(NODE_ID.fullmatch, nodes)),
            "Retry-After" in response.headers,
        )

    def has(self, peer: str, span: PeerRange) -> bool:
        """Return True if a node has content or is receiving it. Raises PeerError."""
        headers = span.headers | {"Cache-Control": STORED}
        response = self._send("HEAD", peer, span.path, headers, self._timeouts.ping)
        response.finish()
        return response.status_code == 200

    def _send(
        self, method: str, peer: str, path: str, headers: dict[str, str], limit: float
    ) -> RegistryResponse:
        if self._is_closed:
            raise PeerError("this node is shutting down")
        send = partial(
            self._pools.request, method, url := f"{peer}{path}", headers=self._headers | headers,
            timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=limit), preload_content=False,
            redirect=False, retries=False,
        )  # fmt: skip
        with _translate_errors(peer):
            try:
                raw = send()
            except ProtocolError:
                # The server may have closed the idle connection.
                raw = send()
        return RegistryResponse(raw.status, url, raw.headers, raw)


@contextlib.contextmanager
def _translate_errors(peer: str) -> Iterator[None]:
    """Convert the errors of urllib3 to PeerError."""
    try:
        yield
    except (HTTPTimeoutError, TimeoutError) as error:
        raise PeerError(f"peer {peer} did not respond in time", is_late=True) from error
    except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
        raise PeerError(f"cannot reach peer {peer}: {error}") from error


def _is_range(headers: Mapping[str, str], span: PeerRange) -> bool:
    """Return True if a 206 announces exactly the bytes of ``span``."""
    if "Transfer-Encoding" in headers or "Content-Encoding" in headers:
        return False
    is_as_long = headers.get("Content-Length") == str(span.end - span.start)
    prefix = f"bytes {span.start}-{span.end - 1}/"
    return is_as_long and headers.get("Content-Range", "").startswith(prefix)

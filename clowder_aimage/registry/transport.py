"""One request over requests' connection pools, without what requests does around each.

Preparing a request, cookies, hooks and the environment cost requests three times what urllib3
needs for the request itself, which counts with thousands of blobs. What requests decides once for
an origin (proxy, certificates, pool) is asked of it once and kept.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
import urllib3.connection
import urllib3.connectionpool
from requests import exceptions
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    MaxRetryError,
    NewConnectionError,
    ProtocolError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.util.wait import wait_for_write

from clowder_aimage.registry.response_error import finish

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_BLOCK = 1024 * 1024
SEND_TIMEOUT = 60.0  # seconds in which a registry takes no byte of a body: it may be busy with some
_NO_RETRY = urllib3.Retry(0, read=False)


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL: what credentials belong to."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


class StreamBody:
    """``size`` bytes of a stream from ``offset`` on, where it stands, as the body of a request.

    Where there is no TLS and the stream is a file, the kernel sends it: the stream has ``fileno``
    then, and ``sent``, which hears how much went. Else it is read in blocks; where the stream
    should end with them (``last``), the last block is held back until it has.
    """

    def __init__(self, stream: BinaryIO, offset: int, size: int, *, last: bool) -> None:
        self._stream = stream
        self._offset = offset
        self._size = size
        self._last = last

    def send_to(self, sock: socket.socket) -> None:
        """Write the bytes to a socket. Raises OSError, and what the stream raises."""
        if type(sock) is socket.socket and hasattr(self._stream, "sent"):
            self._send_file(sock)
            return
        left = self._size
        while left:
            block = self._stream.read(min(left, _BLOCK))
            left -= len(block)
            if not block or (self._last and not left and self._stream.read(1)):
                raise EOFError("the body has another length than it should")
            sock.sendall(block)

    def _send_file(self, sock: socket.socket) -> None:
        file, offset, end = self._stream.fileno(), self._offset, self._offset + self._size
        while offset < end:
            try:
                count = os.sendfile(sock.fileno(), file, offset, min(end - offset, _BLOCK))
            except BlockingIOError:  # a socket with a timeout never blocks by itself
                if not wait_for_write(sock, sock.gettimeout()):
                    raise TimeoutError("the registry takes no more of the body") from None
                continue
            if not count:
                raise EOFError("the body has another length than it should")
            offset += count
            self._stream.sent(count)  # type: ignore[attr-defined]


class _SendsStreams:
    """A connection of urllib3 that knows StreamBody."""

    def send(self, data: Any) -> None:
        sock: socket.socket | None = self.sock  # type: ignore[attr-defined]
        if sock is not None:  # until now it was that of connecting; the answer has its own
            sock.settimeout(SEND_TIMEOUT)
        if sock is None or not isinstance(data, StreamBody):
            super().send(data)  # type: ignore[misc]
            return
        try:
            data.send_to(sock)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            # as without TLS: urllib3 then looks whether there is an answer already
            raise BrokenPipeError(errno.EPIPE, str(error)) from error


class _HTTPConnection(_SendsStreams, urllib3.connection.HTTPConnection):
    pass


class _HTTPSConnection(_SendsStreams, urllib3.connection.HTTPSConnection):
    pass


class _HTTPPool(urllib3.connectionpool.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(urllib3.connectionpool.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


POOLS = {"http": _HTTPPool, "https": _HTTPSPool}


class Transport:
    """Sends requests as ``session`` is set up to. Threads may share it."""

    def __init__(self, session: requests.Session) -> None:
        self._session = session
        self._headers = {"Accept": "*/*", "User-Agent": str(session.headers["User-Agent"])}
        self._routes: dict[tuple[str, str, int], tuple[Any, bool]] = {}

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Any = None,
        *,
        timeout: urllib3.Timeout,
    ) -> requests.Response:
        """Send a request; the answer's body is not read yet.

        Redirects of GET and HEAD are followed, without Authorization to another origin, and never
        from https to http.

        Raises:
            requests.RequestException, OSError: as requests does; InvalidURL also for a redirect.
        """
        history: list[requests.Response] = []
        sent = {**self._headers, **headers}
        while True:
            answer = self._once(method, url, sent, body, timeout)
            answer.history = history
            where = answer.headers.get("Location")
            if answer.status_code not in _REDIRECTS or not where or method not in ("GET", "HEAD"):
                return answer
            finish(answer)
            history = [*history, answer]
            if len(history) > _MOST_REDIRECTS:
                raise exceptions.TooManyRedirects(f"more than {_MOST_REDIRECTS} redirects")
            try:
                target = urljoin(url, where)
                elsewhere = origin(url) != origin(target)
            except ValueError:
                raise exceptions.InvalidURL("it redirected to what is no address") from None
            if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
                raise exceptions.InvalidSchema("redirected from https to http")
            if elsewhere:
                sent.pop("Authorization", None)
            url = target

    def _once(
        self, method: str, url: str, headers: Mapping[str, str], body: Any, timeout: urllib3.Timeout
    ) -> requests.Response:
        pool, whole = self._route(url)
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        with _as_requests():
            raw = pool.urlopen(
                method,
                url if whole else path,
                body=[body] if isinstance(body, StreamBody) else body,
                headers=headers,
                redirect=False,
                assert_same_host=False,
                preload_content=False,
                decode_content=False,
                retries=_NO_RETRY,
                timeout=timeout,
            )
        answer = requests.Response()
        answer.status_code, answer.url, answer.raw = raw.status, url, raw
        answer.headers = raw.headers
        return answer

    def _route(self, url: str) -> tuple[Any, bool]:
        """The pool for a URL's origin, and whether a proxy wants to be told the whole URL."""
        key = origin(url)
        if key not in self._routes:
            request = requests.Request("GET", url).prepare()
            settings = self._session.merge_environment_settings(url, {}, True, None, None)
            adapter: Any = self._session.get_adapter(url)
            verify, cert, proxies = settings["verify"], settings["cert"], settings["proxies"]
            pool = adapter.get_connection_with_tls_context(
                request, verify, proxies=proxies, cert=cert
            )
            adapter.cert_verify(pool, url, verify, cert)
            self._routes[key] = pool, adapter.request_url(request, proxies) != request.path_url
        return self._routes[key]


class _as_requests:
    """urllib3's errors as requests' own, as its adapter tells them."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MaxRetryError):
            raise _unreachable(error) from error
        if isinstance(error, ReadTimeoutError):
            raise exceptions.ReadTimeout(error) from error
        if isinstance(error, SSLError):
            raise _untrusted(error) from error
        if isinstance(error, ProtocolError | OSError | EOFError):
            raise exceptions.ConnectionError(error) from error
        if isinstance(error, HTTPError):
            raise exceptions.RequestException(error) from error


def _untrusted(error: SSLError) -> exceptions.RequestException:
    """What went wrong in TLS; that the connection is over, or garbled, is no matter of trust."""
    inner = error.args[0] if error.args else None
    is_over = isinstance(inner, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    if is_over or "BAD_RECORD_MAC" in str(getattr(inner, "reason", "")):
        return exceptions.ConnectionError(ProtocolError("Connection aborted.", inner))
    return exceptions.SSLError(error)


def _unreachable(error: MaxRetryError) -> exceptions.RequestException:
    reason = error.reason
    if isinstance(reason, ConnectTimeoutError) and not isinstance(reason, NewConnectionError):
        return exceptions.ConnectTimeout(error)
    if isinstance(reason, SSLError):
        return _untrusted(reason)
    if isinstance(reason, ProxyError):
        return exceptions.ProxyError(error)
    return exceptions.ConnectionError(error)

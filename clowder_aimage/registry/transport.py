"""Requests over requests' connection pools, without requests' overhead for each.

requests takes three times as long to prepare a request as urllib3 takes to send it. It is therefore
used once per origin (proxy, certificates, pool), and urllib3 sends.
"""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProtocolError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.util.wait import wait_for_write

from clowder_aimage.content import telemetry
from clowder_aimage.content.store import FileStream, Reader
from clowder_aimage.content.timed_response import TimedResponse
from clowder_aimage.errors import NetworkError, build_extra_error
from clowder_aimage.registry.proxy import (
    build_connection_error,
    build_refusal,
    describe_proxy,
    describe_way,
    is_refusal,
)
from clowder_aimage.registry.reach import Boundary
from clowder_aimage.registry.response import RegistryResponse, build_timeout_error, is_overdue
from clowder_aimage.registry.retry import BrokenOffError
from clowder_aimage.registry.trace import (
    OnTrace,
    RequestTrace,
    parse_body_size,
    redact_headers,
    redact_url,
)

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BLOCK = 1024 * 1024
# Of sendfile(2): some files of FUSE and of old kernels.
_NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EOVERFLOW}
# Seconds for _STEP bytes: the registry may be storing received bytes.
SEND_TIMEOUT = 60.0
_STEP = 128 * 1024
_NO_RETRY = urllib3.Retry(False)
# A request line for a path, and headers in ASCII.
_PLAIN_REQUEST = re.compile(
    r"[A-Z]+ [!-~]+ HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t -~]*\r\n)+\r\n"
)
# A line break within a header (RFC 9112, 5.2).
_FOLD = re.compile(r"\r?\n[ \t]*")
# The content type and version of an alert (RFC 8446, 5.1).
# Places in the source of Python and OpenSSL, around the words of a message
_SSL_PLACE = re.compile(r"\[SSL: [A-Z_]+\] (certificate verify failed: )?|\.? \(_ssl\.c:[0-9]+\)")
_TLS_ALERT = "\x15\x03"
_TLS_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


def parse_origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a URL. Credentials belong to an origin."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


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
        while remaining:
            block = memoryview(self.stream.read(min(remaining, _BLOCK)))
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


class _StreamSender:
    """A connection of urllib3 that sends StreamBody, and keeps its timed response."""

    response: TimedResponse | None = None
    addresses: Addresses = {}  # noqa: RUF012 - read only
    boundary: Boundary | None = None
    # Method, URL and options of a request that this class has sent, until its response.
    _sent: tuple[str, str, dict[str, Any]] | None = None

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
        head = self._build_head(method, url, headers or {})
        if head is None or not isinstance(body, bytes | list | None):
            super().request(method, url, body=body, headers=headers, **options)  # type: ignore[misc]
            return
        if self.sock is not None:  # type: ignore[attr-defined]
            self.sock.settimeout(self.timeout)  # type: ignore[attr-defined]
        # urllib3 reads a response that arrived although the body could not be sent.
        self._sent = method, url, options
        self.send(head)
        for block in [body] if isinstance(body, bytes) else body or ():
            self.send(block)

    def _build_head(self, method: str, url: str, headers: Mapping[str, str]) -> bytes | None:
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

    def getresponse(self) -> Any:
        """Return the response to a request, as urllib3 does."""
        if self._sent is None:
            return super().getresponse()  # type: ignore[misc]
        (method, url, options), self._sent = self._sent, None
        sock: Any = self.sock  # type: ignore[attr-defined]
        sock.settimeout(self.timeout)  # type: ignore[attr-defined]
        response = self.response_class(sock, method=method)
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
        return urllib3.HTTPResponse(
            response,
            urllib3.HTTPHeaderDict(pairs),
            response.status,
            version=response.version,
            reason=response.reason,
            preload_content=options["preload_content"],
            decode_content=options["decode_content"],
            original_response=response,
            request_method=method,
            request_url=url,
        )

    def response_class(self, *args: Any, **kwargs: Any) -> TimedResponse:
        self.response = TimedResponse(*args, **kwargs)
        return self.response

    def send(self, data: Any) -> None:
        sock: socket.socket | None = self.sock  # type: ignore[attr-defined]
        # This replaces the connect timeout. The response sets its own.
        if sock is not None:
            sock.settimeout(SEND_TIMEOUT)
        try:
            if sock is None or not isinstance(data, StreamBody):
                super().send(data)  # type: ignore[misc]
            else:
                data.send_to(sock)
        except _TLS_ENDED as error:
            # As without TLS: urllib3 then reads a response or an alert that arrived early
            raise BrokenPipeError(errno.EPIPE, str(error)) from error


def _build_pool_class(
    kind: type[HTTPConnectionPool], addresses: Addresses, boundary: Boundary | None
) -> type[HTTPConnectionPool]:
    fields = {"addresses": addresses, "boundary": boundary}
    connection = type("Connection", (_StreamSender, kind.ConnectionCls), fields)
    return type(kind.__name__, (kind,), {"ConnectionCls": connection})


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


class _Route(NamedTuple):
    """The way to an origin: a pool, and the host and port of the proxy if there is one.

    ``needs_url`` is True if the proxy requires a full URL.
    """

    pool: Any
    needs_url: bool
    proxy: str


class Transport:
    """The sender of requests to ``registry``, as ``session`` is configured. Thread-safe.

    ``own_headers`` are sent to one origin only. ``on_exchange`` gets each request.
    """

    def __init__(
        self,
        session: requests.Session,
        registry: str,
        *,
        has_answered: bool = False,
        own_headers: tuple[str, Mapping[str, str]] = ("", {}),
        on_exchange: OnTrace | None = None,
    ) -> None:
        self._session, self._registry = session, registry
        self._boundary: Boundary | None = getattr(session, "boundary", None)
        self._own_headers = (parse_origin(own_headers[0]), own_headers[1])
        self._on_exchange = on_exchange
        self._headers = {"Accept": "*/*", "User-Agent": str(session.headers["User-Agent"])}
        self._routes: dict[tuple[str, str, int], _Route] = {}
        # The same by the part of a URL before its path, as it is written.
        self._known_routes: dict[str, _Route] = {}
        self.has_answered = has_answered

    def close(self) -> None:
        """Close the connections of the session."""
        self._session.close()

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Any = None,
        *,
        timeout: urllib3.Timeout,
        max_redirects: int = 5,
    ) -> RegistryResponse:
        """Send a request.

        Redirects of GET and HEAD are followed, without Authorization to another origin, and never
        from https to http. Raises NetworkError.
        """
        sent = {**self._headers, **headers}
        telemetry.inject(sent)
        for count in range(max_redirects + 1):
            response = self._send_traced(method, url, sent, body, timeout)
            response.is_redirected = count > 0
            location = response.headers.get("Location")
            is_redirect = response.status_code in _REDIRECTS and method in ("GET", "HEAD")
            if not location or not is_redirect or not max_redirects:
                return response
            response.finish()
            try:
                target = urljoin(url, location)
                is_elsewhere = parse_origin(url) != parse_origin(target)
            except ValueError:
                raise self._build_request_error("redirect to an invalid URL", url) from None
            if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
                raise self._build_request_error("redirect from https to http", url)
            if is_elsewhere:
                sent.pop("Authorization", None)
            url = target
        raise self._build_request_error(f"more than {max_redirects} redirects", url)

    def _send_traced(
        self, method: str, url: str, headers: Mapping[str, str], body: Any, timeout: urllib3.Timeout
    ) -> RegistryResponse:
        """Send one request, with the headers of its origin, and report it."""
        if self._own_headers[1] and parse_origin(url) == self._own_headers[0]:
            headers = {**headers, **self._own_headers[1]}
        report, started = self._on_exchange, time.monotonic()
        if report is None:
            return self._send(method, url, headers, body, timeout)

        def exchange(status: int, **fields: Any) -> RequestTrace:
            size = body.size if isinstance(body, StreamBody) else len(body or b"")
            seconds, sent = time.monotonic() - started, redact_headers(headers)
            details = {"sent": size, "request_headers": sent, **fields}
            return RequestTrace(method, redact_url(url), status, seconds, **details)

        try:
            response = self._send(method, url, headers, body, timeout)
        except NetworkError as error:
            report(exchange(0, error=str(error)))
            raise
        reply_headers = response.headers
        size = None if method == "HEAD" else parse_body_size(reply_headers)
        report(
            exchange(
                response.status_code, received=size, response_headers=redact_headers(reply_headers)
            )
        )
        return response

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Any, timeout: urllib3.Timeout
    ) -> RegistryResponse:
        try:
            pool, needs_url, proxy = self._find_route(url)
            raw = pool.urlopen(
                method,
                url if needs_url else _find_path(url),
                body=[body] if isinstance(body, StreamBody) else body,
                headers=headers,
                redirect=False,
                assert_same_host=False,
                preload_content=False,
                decode_content=False,
                retries=_NO_RETRY,
                timeout=timeout,
            )
        except (requests.RequestException, HTTPError, OSError, EOFError) as error:
            raise self._build_network_error(error, url) from error
        if proxy and raw.status == 407:
            raw.close()
            raise build_refusal(proxy, urlsplit(url).netloc, 407, "")
        self.has_answered = True
        # Of HTTPS, the proxy sees only bytes.
        way = describe_way(proxy) if needs_url else ""
        return RegistryResponse(raw.status, url, raw.headers, raw, method=method, way=way)

    def _find_route(self, url: str) -> _Route:
        """Return the way to a URL's origin. Raises UsageError for proxies that cannot be used."""
        prefix = url[: _find_path_start(url)]
        if (route := self._known_routes.get(prefix)) is None:
            route = self._known_routes[prefix] = self._choose_route(url)
        return route

    def _choose_route(self, url: str) -> _Route:
        key = parse_origin(url)
        if key not in self._routes:
            request = requests.Request("GET", url).prepare()
            settings = self._session.merge_environment_settings(url, {}, True, None, None)
            adapter: Any = self._session.get_adapter(url)
            verify, cert, proxies = settings["verify"], settings["cert"], settings["proxies"]
            proxy_url = requests.utils.select_proxy(url, proxies) or ""
            proxy = describe_proxy(proxy_url)
            if proxy and self._boundary is not None:
                self._boundary.check_proxied(key[1])
            if proxy_url.startswith("socks") and importlib.util.find_spec("socks") is None:
                raise build_extra_error(f"the SOCKS proxy {proxy}", "socks")
            pool = adapter.get_connection_with_tls_context(
                request, verify, proxies=proxies, cert=cert
            )
            adapter.cert_verify(pool, url, verify, cert)
            needs_url = adapter.request_url(request, proxies) != request.path_url
            self._routes[key] = _Route(pool, needs_url, proxy)
        return self._routes[key]

    def _build_request_error(self, reason: str, url: str) -> NetworkError:
        way = describe_way(self._find_proxy(url))
        return NetworkError(f"request to {self._registry}{way} failed: {reason}")

    def _find_proxy(self, url: str) -> str:
        """Return host and port of the proxy to a URL's origin, or an empty text."""
        route = self._routes.get(parse_origin(url))
        return route.proxy if route is not None else ""

    def _describe_host(self, url: str) -> str:
        """Return the name of the registry, or of the host that it leads to."""
        base, origin = self._own_headers[0], parse_origin(url)
        if not base[1] or base[1:] == origin[1:]:
            return self._registry
        host = urlsplit(url).netloc.rpartition("@")[2][:100]
        return f"{host} (a redirect of {self._registry})"

    def _build_network_error(self, error: Exception, url: str) -> NetworkError:
        """Convert an error of urllib3, requests or the system."""
        reason, proxy = _describe_error(error), self._find_proxy(url)
        name = self._describe_host(url) + describe_way(proxy)
        if proxy:
            is_unconnected = isinstance(error, NewConnectionError | ProxyError)
            if is_unconnected or isinstance(error, ConnectTimeoutError) or is_refusal(reason):
                return build_connection_error(proxy, urlsplit(url).netloc, reason)
        if isinstance(error, ProtocolError) and reason.startswith(_TLS_ALERT):
            return NetworkError(
                f"{name} answered an HTTP request with a TLS alert",
                hint="the registry expects HTTPS",
                remedy="https",
            )
        if isinstance(error, SSLError) and not _is_broken(error):
            return _build_tls_error(name, urlsplit(url).netloc, reason)
        # NewConnectionError is also a ConnectTimeoutError: it is handled first.
        if isinstance(error, NewConnectionError):
            return NetworkError(
                f"cannot reach {name}: {reason}",
                hint="check the host and the port, and that the registry is running",
            )
        if isinstance(error, ConnectTimeoutError):
            return NetworkError(
                f"connection to {name} timed out",
                hint="check the host, the port and the network",
            )
        if is_overdue(error):
            return build_timeout_error(name)
        if isinstance(error, ReadTimeoutError):
            return (BrokenOffError if self.has_answered else NetworkError)(
                f"{name} accepts connections but does not respond",
                hint="the registry may be overloaded; try again later",
            )
        if isinstance(error, SSLError | ProtocolError | EOFError):
            may_be_tls = not self.has_answered and urlsplit(url).scheme == "http"
            return BrokenOffError(
                f"connection to {name} lost ({reason})",
                hint="try again",
                # OpenSSL sends no alert to HTTP, it ends the connection.
                remedy="https" if may_be_tls else "",
            )
        return self._build_request_error(reason, url)


def _find_path_start(url: str) -> int:
    """Return the index of the slash that ends the authority of a URL; 0 if it has none."""
    return max(0, url.find("/", url.find("://") + 3))


def _find_path(url: str) -> str:
    """Return path and query of a URL."""
    if (start := _find_path_start(url)) and "#" not in url and "?" not in url[:start]:
        return url[start:]
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _is_broken(error: SSLError) -> bool:
    """Return True if TLS ended or was garbled, as opposed to a certificate error."""
    inner = error.args[0] if error.args else None
    return isinstance(inner, _TLS_ENDED) or "BAD_RECORD_MAC" in str(getattr(inner, "reason", ""))


def _build_tls_error(name: str, host: str, reason: str) -> NetworkError:
    if "certificate required" in reason.lower():
        return NetworkError(
            f"{name} requires a client certificate: {reason}",
            remedy="client_certificate",
            registry=host,
        )
    if "certificate" in reason.lower():
        return NetworkError(
            f"cannot verify the certificate of {name}: {_SSL_PLACE.sub('', reason)}",
            hint="its certificate authority must be trusted on this machine",
            remedy="ca_file",
        )
    return NetworkError(
        f"TLS handshake with {name} failed: {reason}",
        hint="the registry may expect HTTP",
        remedy="plain_http",
    )


def _describe_error(error: BaseException) -> str:
    """Return the text of the innermost error, without addresses of Python objects."""
    inner: object = error
    while isinstance(inner, BaseException):
        error = inner
        inner = error.__cause__ or getattr(error, "reason", None) or error.__context__
    text = getattr(error, "strerror", None) or str(error)
    return str(text).rpartition(">: ")[2][:300]

"""Requests over connection pools, with redirects, and the errors for failed ones."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProtocolError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

from clowder_aimage.content import telemetry
from clowder_aimage.errors import NetworkError, build_extra_error
from clowder_aimage.registry.connection import TLS_ENDED, StreamBody
from clowder_aimage.registry.connection_pool import ConnectionPools
from clowder_aimage.registry.proxy import (
    build_connection_error,
    build_refusal,
    describe_proxy,
    describe_way,
    is_refusal,
)
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
# Places in the source of Python and OpenSSL, around the words of a message
_SSL_PLACE = re.compile(r"\[SSL: [A-Z_]+\] (certificate verify failed: )?|\.? \(_ssl\.c:[0-9]+\)")
# The content type and version of an alert (RFC 8446, 5.1).
_TLS_ALERT = "\x15\x03"


def parse_origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a URL. Credentials belong to an origin."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


class _Route(NamedTuple):
    """The way to an origin: a pool, and the host and port of the proxy if there is one.

    ``needs_url`` is True if the proxy requires a full URL.
    """

    pool: Any
    needs_url: bool
    proxy: str


class Transport:
    """The sender of requests to ``registry`` over ``pools``. Thread-safe.

    ``own_headers`` are sent to one origin only. ``on_exchange`` gets each request.
    """

    def __init__(
        self,
        pools: ConnectionPools,
        registry: str,
        *,
        has_answered: bool = False,
        own_headers: tuple[str, Mapping[str, str]] = ("", {}),
        on_exchange: OnTrace | None = None,
    ) -> None:
        self._pools, self._registry = pools, registry
        self._own_headers = (parse_origin(own_headers[0]), own_headers[1])
        self._on_exchange = on_exchange
        self._headers = {"Accept": "*/*", "User-Agent": pools.user_agent}
        self._routes: dict[tuple[str, str, int], _Route] = {}
        # The same by the part of a URL before its path, as it is written.
        self._known_routes: dict[str, _Route] = {}
        self.has_answered = has_answered

    def close(self) -> None:
        """Close the connections of the pools."""
        self._pools.close()

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
            target = url if needs_url else _find_path(url)
            raw = pool.exchange(method, target, headers, body, timeout)
        except (HTTPError, OSError, EOFError) as error:
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
            proxy_url = self._pools.find_proxy(url)
            proxy = describe_proxy(proxy_url)
            if proxy:
                self._pools.boundary.check_proxied(key[1])
            is_socks = proxy_url.startswith("socks")
            if is_socks and importlib.util.find_spec("socks") is None:
                raise build_extra_error(f"the SOCKS proxy {proxy}", "socks")
            pool = self._pools.get(url, proxy_url)
            needs_url = bool(proxy) and key[0] == "http" and not is_socks
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
        """Convert an error of urllib3 or the system."""
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
    return isinstance(inner, TLS_ENDED) or "BAD_RECORD_MAC" in str(getattr(inner, "reason", ""))


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

"""Access control: tokens and their scopes, ``Host`` and ``Origin``."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import re
from collections.abc import Collection, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from clowder_aimage.http import PRODUCT
from clowder_aimage.http.api_error import OCI, ApiError, find_interface
from clowder_aimage.http.caller import compute_name
from clowder_aimage.http.route import ADMIN, INFER, NODE, OPEN, READ, WRITE

# Among allowed hosts: IP addresses, which need no resolution
ANY_ADDRESS = "*"
# RFC 9110, 7.2
_HOST = re.compile(
    r"(?P<name>[a-z0-9._-]{1,253}|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{0,5}))?",
    re.ASCII | re.IGNORECASE,
)
_MAX_PORT = 65535
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_ALLOWED = {
    INFER: "the scope infer only allows generating pictures and listing models",
    NODE: "the scope node only allows reading content of another node",
    READ: "the scope read only allows pulling",
    WRITE: "the scope write only allows pulling and pushing",
}
# Registry clients send credentials only after this challenge (RFC 7617)
_REGISTRY_CHALLENGE = f'Basic realm="{PRODUCT} registry", charset="UTF-8"'
_CHALLENGE = f'Bearer realm="{PRODUCT}"'
_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
# Names in Access-Control-Request-Headers: they are echoed, so their characters are limited
_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")


def check_host(allowed: frozenset[str] | None, origins: Collection[str] | None) -> Middleware:
    """Refuse requests that a malicious web page may have caused.

    DNS rebinding (CVE-2024-28224): the ``Host`` must be in ``allowed``; None allows any host.
    Cross-site requests: only browsers send an ``Origin``. It must be the same host, a loopback
    host, or in ``origins``; None allows the same host only. A request that changes state must not
    be cross-site without an allowed origin (Fetch Metadata, ``Sec-Fetch-Site``).

    ``request["origin"]`` is the allowed origin of another site. Its preflight requests are answered
    here (Fetch, 3.3).
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        name = parse_host(host)
        if host and name is None:
            raise ApiError(400, f"invalid Host header {host[:300]!r}", code="invalid_host")
        if not (allowed is None or name in allowed or (ANY_ADDRESS in allowed and is_ip(name))):
            raise ApiError(
                403,
                f"host {host[:300]!r} is not allowed",
                code="host_not_allowed",
                details=({"host": host[:300]},),
                hint="add it to the allowed hosts",
                remedy="allow_host",
                host=(name or host)[:300],
            )
        origin = request.headers.get("Origin")
        if origin is None or origin in (f"http://{host}", f"https://{host}"):
            if request.method not in ("GET", "HEAD"):
                check_site(request)
            return await handler(request)
        if origins is None or not (origin in origins or _is_loopback(origin)):
            raise ApiError(
                403,
                f"origin {origin[:300]!r} is not allowed",
                code="origin_not_allowed",
                hint="add it to the allowed origins",
                remedy="allow_origin" if origins is not None else "",
                origin=origin[:300],
            )
        request["origin"] = origin
        requested_method = request.headers.get("Access-Control-Request-Method")
        if requested_method and request.method == "OPTIONS":
            return _answer_preflight(request)
        return await handler(request)

    return middleware


def check_site(request: web.Request) -> None:
    """Refuse a cross-site request without ``Origin``, such as that of an image of a page.

    Applies to requests that change state, also to GET requests of a cache. Raises ApiError.
    """
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "cross-site request denied", code="origin_not_allowed")


def _answer_preflight(request: web.Request) -> web.Response:
    """Return the response to a preflight request: the methods and headers of later requests."""
    headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": "600"}
    names = request.headers.get("Access-Control-Request-Headers", "")
    if _NAMES.fullmatch(names):
        headers["Access-Control-Allow-Headers"] = names
    return web.Response(status=204, headers=headers)


def check_scope(tokens: Mapping[str, str], scopes: Mapping[web.AbstractRoute, str]) -> Middleware:
    """Refuse requests without a token of the route's scope.

    Without ``tokens`` all are admins, but requests of other origins have the scope infer.

    An unknown path requires a token too, so that responses do not reveal the existing paths.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        required = scopes.get(request.match_info.route, INFER)
        anyone = INFER if "origin" in request else ADMIN
        scope = _find_scope(request, tokens) if tokens else anyone
        if scope is not None:
            request["scope"] = scope
            if tokens:
                token = parse_token(request.headers.get("Authorization", ""))
                request["owner"] = compute_name(token)
        elif required != OPEN:
            is_registry = find_interface(request) == OCI
            headers = {"WWW-Authenticate": _REGISTRY_CHALLENGE if is_registry else _CHALLENGE}
            has_token = parse_token(request.headers.get("Authorization", "")) != ""
            # advice
            message = "unknown token" if has_token else "this worker requires a token"
            message = "authentication required" if is_registry else message
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        if not tokens and required != OPEN and not _includes(scope, required):
            message = "requests of another origin require a token for this"
            raise ApiError(403, message, code="origin_not_allowed", remedy="require_tokens")
        check_required(required, scope)
        return await handler(request)

    return middleware


def check_required(required: str, scope: str | None) -> None:
    """Refuse a request whose scope is not that of the route. Raises ApiError (403)."""
    if required != OPEN and not _includes(scope, required):
        message = _ALLOWED.get(scope or INFER, _ALLOWED[INFER])
        raise ApiError(403, message, code="insufficient_scope")


def _includes(scope: str | None, required: str) -> bool:
    return scope in (required, ADMIN) or (scope, required) == (WRITE, READ)


def _find_scope(request: web.Request, tokens: Mapping[str, str]) -> str | None:
    """Return the scope of the request's token. All tokens are compared, each in constant time."""
    text = parse_token(request.headers.get("Authorization", ""))
    token = text.encode("utf-8", "surrogateescape")
    matched = None
    for candidate, scope in tokens.items():
        if hmac.compare_digest(token, candidate.encode()):
            matched = scope
    return matched


def parse_token(authorization: str) -> str:
    """Return the token in an ``Authorization`` header, or "" if there is none.

    It is a bearer token or the password of any user (RFC 6750, RFC 7617).
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def parse_host(host: str) -> str | None:
    """Return the host in a ``Host`` header without its port; None if it is not valid.

    Of the names of RFC 3986 (3.2.2), those of hosts are valid: without userinfo, escapes and zones.
    """
    match = _HOST.fullmatch(host)
    if match is None or int(match["port"] or 0) > _MAX_PORT:
        return None
    name = match["name"].lower()
    return name if name[0] != "[" else name[1:-1] if is_ip(name[1:-1]) else None


def is_ip(host: str | None) -> bool:
    """Return True if a host is an IP address."""
    try:
        return ipaddress.ip_address(host or "") is not None
    except ValueError:
        return False


def _is_loopback(origin: str) -> bool:
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and parse_host(host) in LOOPBACK_HOSTS

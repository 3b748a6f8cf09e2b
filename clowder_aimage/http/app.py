"""The application: the routes of a server's roles and the middlewares before them.

A request passes through the access log, error conversion, ``Host`` and ``Origin`` checks, token
and scope checks, the shutdown check, and the body reader before its route.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

from aiohttp import ClientError, web
from aiohttp.typedefs import Handler, Middleware

from clowder_aimage.content import telemetry
from clowder_aimage.document.unicode_text import INVALID
from clowder_aimage.engine.admission import CALLER, shutdown_error
from clowder_aimage.errors import AImageError
from clowder_aimage.http import PRODUCT
from clowder_aimage.http import api_error as errors
from clowder_aimage.http.access import LOOPBACK_HOSTS, check_host, check_scope
from clowder_aimage.http.api_error import ADVICE, INTERFACE, OCI, OPENAI, ApiError, find_interface
from clowder_aimage.http.body_receiver import DIRECT
from clowder_aimage.http.body_stream import build_size_error, check_coding, check_type
from clowder_aimage.http.caller import identify_caller, identify_owner
from clowder_aimage.http.caller_ledger import CallerLedger
from clowder_aimage.http.local_request import LocalRequest, Request, add_recorded_headers
from clowder_aimage.http.log import list_frames, name_method
from clowder_aimage.http.loop_watch import watch_requests
from clowder_aimage.http.operation import BODY
from clowder_aimage.http.response_writer import abort
from clowder_aimage.http.route import Exchange, Role, with_head

# Browsers show nothing of a response as a document, unless its route says otherwise
POLICY = "default-src 'none'; frame-ancestors 'none'"
_EXPOSED = (
    "X-Request-Id, X-Aimage-Model, X-Aimage-Digest, X-Aimage-Alias, X-Aimage-Seed, "
    "X-Aimage-Ignored, X-Aimage-Warning, Retry-After"
)
MAX_BODY = 16 * BODY
# Seconds for a request's body to arrive
BODY_TIMEOUT = 30.0
# nginx's status for the log; it is never sent
CLIENT_CLOSED_REQUEST = 499
# Routes of OpenAI's and ollama's APIs that no role has
_UNSUPPORTED = re.compile(
    r"/v1/(chat/completions|completions|responses|embeddings|audio"
    r"|moderations|videos|files|uploads|batches|fine_tuning|assistants|threads|vector_stores"
    r"|realtime)(/.*)?|/api/(chat|embed|embeddings|create|blobs)(/.*)?"
)
_ID, _OUR_ID = re.compile(r"[A-Za-z0-9._-]{1,64}"), re.compile(r"[0-9a-f]{16}")

_log = logging.getLogger("aimage.http")


def build_app(
    *roles: Role,
    hosts: frozenset[str] | None = LOOPBACK_HOSTS,
    tokens: Mapping[str, str] | None = None,
    interface: str = OPENAI,
    origins: Collection[str] | None = None,
    advice: Callable[[AImageError], str | None] | None = None,
) -> web.Application:
    """Return the application that serves the routes of ``roles``.

    Args:
        roles: Their routes are matched in this order.
        hosts: The names that a request's Host header may carry; None: any.
        tokens: The tokens with their scopes. Without tokens, all clients are admins.
        interface: The form of errors outside of the interfaces.
        origins: Allowed origins besides loopback ones; None: only that of the server.
        advice: Return the advice on an error that is sent with it; None: its hint.
    """
    # Plain names for a request's entries: typed keys require aiohttp 3.14.
    warnings.simplefilter("ignore", web.NotAppKeyWarning)
    scopes: dict[web.AbstractRoute, str] = {}
    bodies: dict[web.AbstractRoute, int | None] = {}
    app = web.Application(
        middlewares=[
            # Outermost first: all below is measured, counted, and answered in the interface's form
            watch_requests,
            _account(roles),
            answer_errors,
            check_host(hosts, origins),
            check_scope({} if tokens is None else tokens, scopes),
            _hold_body(_find_ledger(roles)),
            _refuse_at_the_end(roles),
            _read_body(bodies),
        ],
        client_max_size=MAX_BODY,
    )
    app[INTERFACE] = interface
    app["has_tokens"] = bool(tokens)
    if advice is not None:
        app[ADVICE] = advice
    app.on_response_prepare.append(_set_common_headers)
    app["routes"] = routes = [route for role in roles for route in role.build_routes()]
    for route in with_head(routes):
        added = app.router.add_route(route.method, route.path, route.handler)
        scopes[added], bodies[added] = route.scope, route.body
    return app


def _account(roles: Sequence[Role]) -> Middleware:
    """Assign each request an id, count it, and log one line about it, without its content."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else None
        return await account(roles, request, route, partial(handler, request))

    return middleware


async def account(
    roles: Sequence[Role],
    request: Request,
    route: str | None,
    handle: Callable[[], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    """Handle a request to ``route``, count it for the roles, and log one line about it."""
    route_name, stated_id = route or "unknown", _get_stated_id(request)
    # The log has no text of a client; a request of this process has the id of a gateway
    is_ours = isinstance(request, LocalRequest) and _OUR_ID.fullmatch(stated_id)
    request["id"] = stated_id if is_ours else secrets.token_hex(8)
    started, status, sent = time.perf_counter(), CLIENT_CLOSED_REQUEST, 0
    try:
        response = await _trace(request, route, handle)
        status = response.status
        sent = 0 if request.method == "HEAD" else response.content_length or 0
        return response
    except asyncio.CancelledError:
        # The client may disconnect after the last byte, before the handler returns
        status = request.get("ended", status)
        raise
    finally:
        seconds, received = time.perf_counter() - started, _count_received(request)
        sent = request.get("sent", sent)
        for role in roles:
            role.count(Exchange(request.method, route_name, status, seconds, received, sent))
        facts = {
            "method": name_method(request.method),
            "route": route_name,
            "status": status,
            "seconds": round(seconds, 4),
            "id": request["id"],
        }
        if find_interface(request) == OCI:
            facts |= {"received": received, "sent": sent}
            if route is not None:
                facts["path"] = _format_path(request)
        if "model" in request:
            facts["model"] = str(request["model"])
        # nodes request ranges from each other by the hundred
        level = logging.DEBUG if "Aimage-Node" in request.headers else logging.INFO
        _log.log(level, "request", extra=facts)


def _get_stated_id(request: Request) -> str:
    """Return the id that a client has chosen for a request, or "" if it is none."""
    stated_id = request.headers.get("X-Request-Id", "")
    return stated_id if _ID.fullmatch(stated_id) else ""


def _count_received(request: Request) -> int:
    if not isinstance(request, web.Request):
        return 0
    return request.content.total_bytes + int(request.get(DIRECT, 0))


async def _trace(
    request: Request, route: str | None, handle: Callable[[], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Handle a request in a span (OpenTelemetry, "Semantic Conventions for HTTP Spans")."""
    route = route or ""
    method = name_method(request.method)
    with telemetry.start_span(f"{method} {route}".strip(), headers=request.headers) as span:
        response = await handle()
        if span is not None:
            span.set_attribute("http.request.method", method)
            span.set_attribute("http.route", route)
            span.set_attribute("http.response.status_code", response.status)
            span.set_attribute("aimage.request.id", request["id"])
        return response


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors to responses in the interface's form."""
    return await convert_errors(request, partial(handler, request))


async def convert_errors(
    request: Request, handle: Callable[[], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert an error to a response, in the interface's form.

    If the response has begun, the connection is aborted, so that it does not appear complete.
    """
    try:
        return await handle()
    except ConnectionError:
        # The client has disconnected
        raise
    except Exception as error:
        api_error = _convert_error(request, error)
        if request.get("answered"):
            abort(request)
            raise ConnectionResetError("the response was aborted") from None
        answer = errors.build_response(request, api_error)
        if api_error.status in (408, 413):
            # Do not wait for the rest of the body
            answer.force_close()
        return answer


def _convert_error(request: Request, error: Exception) -> ApiError:
    """Return the response to an exception; log exceptions that the client did not cause."""
    interface = find_interface(request)
    if isinstance(error, AImageError):
        api_error = errors.convert_error(error, interface)
        if api_error.status >= 500:
            _log_failure(request, error, api_error.status)
        return api_error
    if isinstance(error, web.HTTPException):
        return _convert_framework_error(request, error)
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return ApiError(400, "the request body is not JSON", code="invalid_json")
    # Only a client's text can have half of a surrogate pair: texts are checked where they arrive
    if isinstance(error, UnicodeEncodeError):
        return ApiError(400, f"the request {INVALID}", code="invalid_value")
    # aiohttp raises it for a body with invalid chunks or fewer bytes than announced
    if isinstance(error, ClientError):
        return ApiError(400, "the request body is incomplete", code="invalid_body")
    if interface == OCI:
        _log.error("%s %s", request.method, request.path, exc_info=error)
        return ApiError(500, "unknown error", code="UNKNOWN")
    facts = {"id": request["id"], "kind": type(error).__name__, "at": list_frames(error)}
    _log.error("internal error", extra=facts)
    return ApiError(500, "internal error; see the server's log", code="internal_error")


def _log_failure(request: Request, error: AImageError, status: int) -> None:
    # The registry's log may have no fields: the message names the request
    if find_interface(request) == OCI:
        _log.error("%s %s: %s", request.method, request.path, error)
    else:
        facts = {"id": request["id"], "status": status, "reason": error.message}
        _log.warning("request failed", extra=facts)


def _convert_framework_error(request: Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"method not allowed; allowed: {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return build_size_error()
    if error.status == 404:
        return build_url_error(request)
    return ApiError(error.status, error.reason, code="invalid_request")


def build_url_error(request: Request) -> ApiError:
    """Return the response to a request that has no route."""
    is_known = find_interface(request) != OCI and _UNSUPPORTED.fullmatch(request.path)
    name = f"{request.method} {request.rel_url.raw_path[:200]}"
    message = f"{name} is not supported by this worker" if is_known else ""
    return ApiError(404, message or f"no such endpoint: {name}", code="unknown_url")


def _format_path(request: Request) -> str:
    """Return the path for the log: cut and escaped, without the query."""
    return request.rel_url.raw_path[:200].encode("unicode_escape").decode("ascii")


def _refuse_at_the_end(roles: Sequence[Role]) -> Middleware:
    """Refuse new work during shutdown.

    Reads are served; the connection is closed, so that the client's next request can reach another
    server.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        check_running(roles, request.method)
        answer = await handler(request)
        if any(role.is_draining for role in roles):
            answer.force_close()
        return answer

    return middleware


def check_running(roles: Sequence[Role], method: str) -> None:
    """Refuse new work during shutdown. Raises StoppedError."""
    if method not in ("GET", "HEAD") and any(role.is_draining for role in roles):
        raise shutdown_error()


def _find_ledger(roles: Sequence[Role]) -> CallerLedger:
    ledgers = (role.ledger for role in roles)
    return next((ledger for ledger in ledgers if ledger is not None), CallerLedger())


def _hold_body(ledger: CallerLedger) -> Middleware:
    """Count the bytes of the bodies of a caller until their requests end, in ``request["body"]``.

    Bodies that are streamed to a store are not counted.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        CALLER.set(identify_owner(request))
        with ledger.hold(ledger.bounds.body_bytes, identify_caller(request)) as body:
            request["body"] = body
            return await handler(request)

    return middleware


def _read_body(bodies: Mapping[web.AbstractRoute, int | None]) -> Middleware:
    """Read the JSON body before the handler runs; reject large, slow and encoded bodies."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        limit = bodies.get(request.match_info.route, BODY)
        # A blob or a manifest: the route streams the bytes
        if limit is None:
            return await handler(request)
        check_coding(request)
        if (request.content_length or 0) > limit:
            raise build_size_error()
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                size = await _read_counted(request, limit)
        except TimeoutError:
            raise ApiError(408, "timed out reading the request body", code="timeout") from None
        if size and request.match_info.route in bodies:
            check_type(request)
        return await handler(request)

    return middleware


async def _read_counted(request: web.Request, limit: int) -> int:
    """Read the body for ``request.read()``, counting the bytes that arrive; return its size.

    Raises ApiError (413, 429) as soon as it is too large.
    """
    announced = request.content_length or 0
    request["body"].add(announced)
    raw = bytearray()
    async for piece in request.content.iter_any():
        raw += piece
        if len(raw) > limit:
            raise build_size_error()
        # The body of a chunked request has no announced size
        request["body"].add(len(piece) if not announced else 0)
    # Handlers call read(), which would have taken all of it before it is counted
    request._read_bytes = bytes(raw)  # noqa: SLF001
    return len(raw)


async def _set_common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of every response; nothing but the page is a document for browsers."""
    request["answered"] = True
    # Versions would help attackers (RFC 9110, 10.2.4)
    response.headers["Server"] = PRODUCT
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Content-Security-Policy", POLICY)
    if find_interface(request) == OCI:
        response.headers["Docker-Distribution-API-Version"] = "registry/2.0"
    else:
        response.headers.setdefault("Cache-Control", "no-store")
    # Never "*", and no Allow-Credentials: cookies are not used
    if "origin" in request:
        response.headers["Access-Control-Allow-Origin"] = request["origin"]
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        response.headers["Vary"] = "Origin"
    add_recorded_headers(request, response)
    if DIRECT in request:
        # The parser expects the bytes of the body that it has not seen
        response.force_close()
        response.headers["Connection"] = "close"
    if "id" in request:
        response.headers["X-Request-Id"] = _get_stated_id(request) or request["id"]

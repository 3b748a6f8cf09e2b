"""The application: every route, and what every request passes on its way to one."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping

import structlog
from aiohttp import ClientError, web
from aiohttp.typedefs import Handler, Middleware

from clowder_aimage.api import health, ollama_routes, openapi, storage
from clowder_aimage.api.service import Service
from clowder_aimage.engine.engine_error import StoppedError
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.errors import AImageError
from clowder_aimage.http import api_error as fault
from clowder_aimage.http.access import LOOPBACK_HOSTS, check_host, check_scope
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.route import BODY, Route

LARGEST_BODY = 16 * BODY
BODY_TIME = 30.0  # seconds that a request's body may take to come
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_log = structlog.get_logger("aimage.worker")


def build_app(
    service: Service,
    *,
    hosts: frozenset[str] | None = LOOPBACK_HOSTS,
    tokens: Mapping[str, str] | None = None,
    routes: Iterable[Route] | None = None,
) -> web.Application:
    """The application, to be run by ``serve``, with ``routes``, or all that a worker has.

    ``hosts`` are the names that a request's Host header may carry; None stands for any. ``tokens``
    are what callers must know, each with its scope; where there are none, whoever comes is admin.
    """
    # A request's own notes have plain names: keys that carry a type came with aiohttp 3.14.
    warnings.simplefilter("ignore", web.NotAppKeyWarning)
    scopes: dict[web.AbstractRoute, str] = {}
    bodies: dict[web.AbstractRoute, int] = {}
    app = web.Application(
        middlewares=[
            _account(service.metrics),
            _answer_errors,
            check_host(hosts),
            check_scope(tokens or {}, scopes),
            _refuse_at_the_end(service),
            _read_body(bodies),
        ],
        client_max_size=LARGEST_BODY,
    )
    app.on_response_prepare.append(_common_headers)
    for route in _with_head(all_routes(service) if routes is None else routes):
        added = app.router.add_route(route.method, route.path, route.handler)
        scopes[added], bodies[added] = route.scope, route.body
    return app


def all_routes(service: Service) -> list[Route]:
    """Every route that a worker has."""
    from clowder_aimage.api import openai  # which needs what pictures need

    return [*openai.routes(service), *ollama_routes.picture_routes(service), *store_routes(service)]


def store_routes(service: Service) -> list[Route]:
    """Those that keep models, and make no pictures."""
    return [
        route
        for interface in (health, openapi, ollama_routes, storage)
        for route in interface.routes(service)
    ]


def _with_head(routes: Iterable[Route]) -> list[Route]:
    """The routes, and HEAD for each GET (RFC 9110, 9.3.2)."""
    every = list(routes)
    known = {(route.method, route.path) for route in every}
    heads = [
        Route("HEAD", route.path, route.handler, route.scope)
        for route in every
        if route.method == "GET" and ("HEAD", route.path) not in known
    ]
    return every + heads


def _account(metrics: Metrics) -> Middleware:
    """Give each request an id; count it, and write one line on it, without what it asked for."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("X-Request-Id", "")
        request["id"] = asked if _ID.fullmatch(asked) else secrets.token_hex(8)
        begun, status = time.perf_counter(), 499  # nginx's word for a client that left
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "unknown"
            metrics.requests.labels(route, str(status)).inc()
            facts = {"model": str(request["model"])} if "model" in request else {}
            # nodes ask each other for ranges by the hundred
            say = _log.debug if route.startswith("/v1/neighbour") else _log.info
            say(
                "request",
                method=request.method if resource is not None else "-",
                route=route,
                status=status,
                seconds=round(time.perf_counter() - begun, 4),
                id=request["id"],
                **facts,
            )

    return middleware


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a route raises into an answer, unless one has begun: then the connection
    breaks, which is the only thing left that a client notices."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client is gone
    except Exception as error:
        found = _meant(request, error)
        if request.get("answered"):
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the answer broke off") from None
        answer = fault.response(request, found)
        if found.status in (408, 413):
            answer.force_close()  # the rest of the body is not waited for
        return answer


def _meant(request: web.Request, error: Exception) -> ApiError:
    """The error that an exception is for the client."""
    if isinstance(error, AImageError):
        found = fault.api_error(error)
        if found.status >= 500:
            _log.warning("failed", id=request["id"], status=found.status, reason=error.message)
        return found
    if isinstance(error, web.HTTPException):
        return _of_framework(error)
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return ApiError(400, "the request's body is no JSON", code="invalid_json")
    if isinstance(error, ClientError):  # aiohttp's word for a body that is not valid HTTP
        return ApiError(400, "the request's body broke off", code="invalid_body")
    _log.error("a route failed", id=request["id"], kind=type(error).__name__, at=_places(error))
    return ApiError(500, "the worker failed; its log says at what", code="internal_error")


def _places(error: Exception) -> list[str]:
    """Where an error was raised. Its text, and what variables were, may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-5:]]


def _of_framework(error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"this is asked with {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _too_large()
    if error.status == 404:
        return ApiError(404, "there is nothing at this address", code="unknown_url")
    return ApiError(error.status, error.reason, code="invalid_request")


def _refuse_at_the_end(service: Service) -> Middleware:
    """Begin nothing new when the worker is about to end; what only looks is answered, and told to
    come back by a new connection, which another worker may take."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not service.engine.is_draining:
            return await handler(request)
        if request.method not in ("GET", "HEAD"):
            raise StoppedError("the worker is about to end", hint="ask another one")
        answer = await handler(request)
        answer.force_close()
        return answer

    return middleware


def _read_body(bodies: Mapping[web.AbstractRoute, int]) -> Middleware:
    """Read the body before the route begins: neither large ones nor slow ones get any further."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        largest = bodies.get(request.match_info.route, BODY)
        if (request.content_length or 0) > largest:
            raise _too_large()
        try:
            async with asyncio.timeout(BODY_TIME):
                size = len(await request.read())
        except TimeoutError:
            raise ApiError(408, "the request's body did not come", code="timeout") from None
        if size > largest:
            raise _too_large()
        return await handler(request)

    return middleware


def _too_large() -> ApiError:
    return ApiError(413, "the request's body is too large", code="too_large")


async def _common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every answer says; a browser must not guess at content, and keeps none of it."""
    request["answered"] = True
    response.headers["Server"] = "aimage"  # whose versions are nobody's business
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Cache-Control", "no-store")
    if "id" in request:
        response.headers["X-Request-Id"] = request["id"]

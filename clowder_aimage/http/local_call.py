"""Calls of the routes of this process: as requests over HTTP, without a connection and tokens.

A call has the scope of the client for whom it is made. Scopes, limits, errors, the log and the
metrics are those of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from clowder_aimage.errors import AImageError
from clowder_aimage.http.access import check_required
from clowder_aimage.http.api_error import ADVICE
from clowder_aimage.http.app import account, build_url_error, check_running, convert_errors
from clowder_aimage.http.body_stream import build_size_error
from clowder_aimage.http.local_request import LocalRequest, add_recorded_headers
from clowder_aimage.http.log import name_method
from clowder_aimage.http.loop_watch import WatchedCoroutine
from clowder_aimage.http.route import Role, SharedRoute

_PARAMETER = re.compile(r"\{(\w+)(?::([^}]+))?\}")


class LocalCalls:
    """Calls the shared routes of ``role``. ``advice`` is that of ``http.app.build_app``."""

    def __init__(
        self, role: Role, advice: Callable[[AImageError], str | None] | None = None
    ) -> None:
        self._role = role
        self._app: dict[Any, Any] = {} if advice is None else {ADVICE: advice}

    async def send(self, request: LocalRequest) -> web.StreamResponse:
        """Return the response; a stream has been written to the sink of the request.

        Raises ConnectionError if a stream broke off, and the errors of the sink.
        """
        route = self._find(request)
        request.app = self._app
        name = route.path if route else None
        handle = partial(convert_errors, request, partial(self._handle, request, route))
        work = account((self._role,), request, name, handle)
        try:
            response = await WatchedCoroutine(
                work, f"{name_method(request.method)} {name or 'unknown'}"
            )
            add_recorded_headers(request, response)
            return response
        except ConnectionError:
            if request.failure is not None:
                raise request.failure from None
            raise

    @cached_property
    def _routes(self) -> list[tuple[SharedRoute, re.Pattern[str]]]:
        return [
            (route, _compile_pattern(route.path))
            for route in self._role.build_routes()
            if isinstance(route, SharedRoute)
        ]

    def _find(self, request: LocalRequest) -> SharedRoute | None:
        for route, pattern in self._routes:
            match = pattern.fullmatch(request.rel_url.raw_path)
            if match is not None and route.method == request.method:
                request.match_info = {key: unquote(text) for key, text in match.groupdict().items()}
                return route
        return None

    async def _handle(self, request: LocalRequest, route: SharedRoute | None) -> web.StreamResponse:
        if route is None:
            raise build_url_error(request)
        check_required(route.scope, request["scope"])
        check_running((self._role,), request.method)
        if route.body is not None and request.exceeds(route.body):
            raise build_size_error()
        return await route.handler(request)


def _compile_pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of the paths of a route, such as ``/v1/models/{id:.+}``."""
    pattern, end = "", 0
    for parameter in _PARAMETER.finditer(path):
        pattern += (
            re.escape(path[end : parameter.start()])
            + f"(?P<{parameter[1]}>{parameter[2] or '[^/]+'})"
        )
        end = parameter.end()
    return re.compile(pattern + re.escape(path[end:]))


def get_body(response: web.StreamResponse) -> bytes:
    """Return the body of a response that is not a stream."""
    body = response.body if isinstance(response, web.Response) else b""
    return bytes(body) if isinstance(body, bytes | bytearray) else b""

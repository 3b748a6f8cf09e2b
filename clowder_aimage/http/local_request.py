"""Requests of this process to its own routes: values, without HTTP.

A handler of a ``SharedRoute`` takes both kinds of requests. It returns a response that is complete,
or writes a stream with ``ResponseWriter``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web
from multidict import CIMultiDict, MultiMapping
from yarl import URL


class Sink(Protocol):
    """The receiver of a streamed response."""

    async def begin(self, response: web.StreamResponse) -> None:
        """Take the status and the headers."""

    async def write(self, data: bytes) -> None:
        """Take bytes of the body."""


class LocalRequest(dict[str, Any]):
    """A request of this process. Its entries are those of a ``web.Request``.

    Args:
        method: The method of the route.
        target: The path with the query, encoded.
        scope: The scope of the client for whom it is sent.
        caller: An opaque name of that client.
        headers: The headers of that client; they may determine the response.
        fields: The fields of the body, unless there is none.
        is_form: The fields are those of a form: texts, files as bytes, and lists of them.
        size: The bytes of the body as JSON, at most.
        sink: The receiver of a stream; None refuses streams.
    """

    def __init__(
        self,
        method: str,
        target: str,
        *,
        scope: str,
        caller: str = "",
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        fields: Mapping[str, Any] | None = None,
        is_form: bool = False,
        size: int = 0,
        sink: Sink | None = None,
    ) -> None:
        super().__init__(scope=scope, caller=caller)
        self.method = method
        self.rel_url = URL(target, encoded=True)
        self.headers = CIMultiDict(headers)
        self.fields, self.is_form, self.size = fields, is_form, size
        self.sink = sink
        self.match_info: Mapping[str, str] = {}
        # The settings of the server
        self.app: Mapping[Any, Any] = {}
        # An error of the sink, for the caller
        self.failure: Exception | None = None

    scheme = "http"

    @property
    def path(self) -> str:
        """The path, decoded."""
        return self.rel_url.path

    @property
    def query(self) -> MultiMapping[str]:
        """The fields of the query."""
        return self.rel_url.query

    @property
    def host(self) -> str:
        """The name of this server in the client's request."""
        return self.headers.get("Host", "localhost")

    def exceeds(self, limit: int) -> bool:
        """Return True if the body is larger than ``limit`` bytes as JSON."""
        if self.size <= limit:
            return False
        # Files of a form are not counted: their lengths are written in their place
        text = json.dumps(self.fields, ensure_ascii=False, separators=(",", ":"), default=len)
        return len(text.encode("utf-8", "replace")) > limit


Request = web.Request | LocalRequest


def count_body(request: Request) -> int:
    """Return the bytes of the body that have been read."""
    return request.size if isinstance(request, LocalRequest) else int(request["body"].amount)


# The entry of a request with headers of its response, whatever the status of that is
RESPONSE_HEADERS = "response_headers"


def add_recorded_headers(request: Request, response: web.StreamResponse) -> None:
    """Add the headers that were recorded in a request, such as its ignored fields.

    A worker that responds by this server may know more of them: its headers are kept.
    """
    for name, text in request.get(RESPONSE_HEADERS, {}).items():
        response.headers.setdefault(name, text)

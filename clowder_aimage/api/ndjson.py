"""Answers of JSON lines (application/x-ndjson), as ollama has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from aiohttp import web

from clowder_aimage.errors import AImageError
from clowder_aimage.http.api_error import api_error

CONTENT_TYPE = "application/x-ndjson"
_EventT = TypeVar("_EventT")


class NdjsonStream:
    """An answer of JSON lines; an error before the first line has a status of its own."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """A line was sent."""
        return self._response is not None

    async def write(self, value: Mapping[str, Any]) -> None:
        """Send a line now."""
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
            await self._response.prepare(self._request)
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        await self._response.write(line.encode() + b"\n")

    async def fail(self, error: AImageError) -> web.StreamResponse:
        """End with the error: ollama's ``error``, its ``status``, and our ``code``.

        The error is raised if no line was sent.
        """
        if self._response is None:
            raise error
        found = api_error(error)
        facts = {"error": found.message, "status": found.status}
        await self.write({**facts, "code": found.code} if found.code else facts)
        return await self.end()

    async def end(self) -> web.StreamResponse:
        """End the answer."""
        assert self._response is not None  # noqa: S101 - every answer has a line
        await self._response.write_eof()
        return self._response

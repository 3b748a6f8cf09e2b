"""JSON objects in, and JSON or lines of it out (application/x-ndjson), as ollama has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeVar

from aiohttp import web

from clowder_aimage.errors import AImageError, FormatError
from clowder_aimage.http.api_error import ApiError, api_error
from clowder_aimage.oci.strict_json import read_json

CONTENT_TYPE = "application/x-ndjson"
_EventT = TypeVar("_EventT")
_MISSING = "the request has no body; it must be a JSON object"


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body, whatever its Content-Type says: curl's is a form's.

    Raises:
        ApiError: 400, it is none.
    """
    raw = await request.read()
    if not raw.strip():
        raise ApiError(400, _MISSING, code="invalid_json")
    try:
        value = read_json(raw, "the request's body")
    except FormatError as error:
        raise ApiError(400, error.message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request's body must be a JSON object", code="invalid_json")
    return value


def text(body: Mapping[str, Any], *names: str) -> str:
    """The first of the fields ``names`` that is there, a string; "" for none. Raises ApiError."""
    for name in names:
        if (value := body.get(name)) is not None:
            if not isinstance(value, str):
                raise wrong(name, "a string", value)
            try:
                value.encode()
            except UnicodeEncodeError:
                message = f"{name} is not valid Unicode"
                raise ApiError(400, message, code="invalid_value", param=name) from None
            return value
    return ""


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """The field ``name``, true or false. Raises ApiError."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return default if value is None else value


def whole(body: Mapping[str, Any], name: str) -> int | None:
    """The field ``name``, a whole number, or None where it is not there. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(name, "a whole number", value)
    return value


def fields(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The field ``name``, an object; empty where it is not there. Raises ApiError."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value or {}


def wrong(name: str, wanted: str, value: object) -> ApiError:
    """That a field is of another type."""
    kinds = {"dict": "an object", "list": "a list", "str": "a string", "bool": "true or false"}
    found = kinds.get(type(value).__name__, "a number")
    return ApiError(400, f"{name} must be {wanted}, not {found}", code="invalid_type", param=name)


class NdjsonStream:
    """An answer of many lines, which begins with the first of them: an error before that still
    has a status of its own."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a line was sent."""
        return self._response is not None

    async def write(self, value: Mapping[str, Any]) -> None:
        """Send a line now."""
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
            await self._response.prepare(self._request)
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        await self._response.write(line.encode() + b"\n")

    async def fail(self, error: AImageError) -> web.StreamResponse:
        """End with what went wrong: ``error`` as ollama has it, the ``status`` that it would have
        had, and our ``code`` if there is one. Raises the error where no line was sent."""
        if self._response is None:
            raise error
        found = api_error(error)
        said = {"error": found.message, "status": found.status}
        await self.write({**said, "code": found.code} if found.code else said)
        return await self.end()

    async def end(self) -> web.StreamResponse:
        """End the answer."""
        assert self._response is not None  # noqa: S101 - every answer has a line
        await self._response.write_eof()
        return self._response


async def paced(
    events: AsyncGenerator[_EventT, None], first: float, later: float
) -> AsyncGenerator[_EventT | None, None]:
    """The events, and None where there was none for ``later`` seconds (``first`` to begin with).
    Closing this closes ``events``."""
    patience = first
    async with contextlib.aclosing(events):
        while True:
            step = asyncio.ensure_future(anext(events))
            try:
                while not (await asyncio.wait([step], timeout=patience))[0]:
                    patience = later
                    yield None
            finally:
                if not step.done():  # whoever listened has left
                    step.cancel()
                    await asyncio.wait([step])
            try:
                event = step.result()
            except StopAsyncIteration:
                return
            yield event

"""Responses of workers, as a gateway passes them on: some headers and types, within bounds.

The length, and headers about connections, cookies, origins or policies, are those of the gateway.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeVar

from aiohttp import web
from pydantic import Field, TypeAdapter

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.field import STRICT, Count, escape_text, read_fields
from clowder_aimage.fleet.gateway.continuation import NDJSON, SSE
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.operation import JSON

TYPES = (JSON, SSE, NDJSON, "text/plain", "image/png", "image/jpeg", "image/webp")
_TYPE = re.compile(rf"({'|'.join(map(re.escape, TYPES))})(?:; ?charset=utf-8)?")
# Headers that are passed on, in lower case, with what their texts may be
_PASSED = (
    ("x-aimage-[a-z-]+", ".*"),
    ("content-type", ".*"),
    ("retry-after", "[0-9]{1,6}"),
    ("x-should-retry", "false"),
    ("cache-control", "(?:private|no-cache|no-store)(?:,.*)?"),
    ("x-accel-buffering", "no"),
    # A path of the gateway
    ("location", "/[A-Za-z0-9][A-Za-z0-9._~%:/-]*"),
)
# Bytes of a head
_MAX_HEAD = 32 << 10
# Statuses of responses without a body (RFC 9110, 15)
_EMPTY = (204, 205, 304)
_Status = Annotated[int, Field(ge=200, le=599)]
_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$")]
_HeaderText = Annotated[str, Field(pattern=r"^[\t\x20-\x7e]{0,4096}$")]
_Headers = Annotated[tuple[tuple[_HeaderName, _HeaderText], ...], Field(max_length=100)]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The status and the headers of a response."""

    __pydantic_config__ = STRICT

    status: _Status
    headers: _Headers

    @property
    def media_type(self) -> str:
        """The type of the body, without parameters; "" if there is none."""
        return next(iter(self._list_types()), "").partition(";")[0]

    def _list_types(self) -> list[str]:
        return [text for name, text in self.headers if name.lower() == "content-type"]

    def check(self) -> None:
        """Raise FormatError unless the body has one type of TYPES, or none."""
        types = self._list_types()
        if len(types) > 1 or not all(map(_TYPE.fullmatch, types)):
            shown = escape_text(", ".join(types))
            raise FormatError(f"it has the content type {shown!r}")

    def apply(self, response: web.StreamResponse) -> None:
        """Set the status and the headers of a response to a client."""
        response.set_status(self.status)
        response.headers.pop("Content-Type", None)
        for name, text in self.headers:
            if _is_passed(name.lower(), text):
                response.headers.add(name, text)

    def build_response(self, body: bytes) -> web.Response:
        """Return the whole response to a client."""
        response = web.Response(body=None if self.status in _EMPTY else body)
        self.apply(response)
        return response


@dataclass(frozen=True, slots=True)
class AnswerHead(ResponseHead):
    """The status and the headers of an answer, and the bytes of its body."""

    size: Count


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The reason that a job was given up."""

    __pydantic_config__ = STRICT

    status: Annotated[int, Field(ge=400, le=599)]
    code: Annotated[str, Field(pattern="^[a-z0-9_]{1,64}$")]
    message: Annotated[str, Field(max_length=4096)]


_HEAD, _ANSWER, _END = TypeAdapter(ResponseHead), TypeAdapter(AnswerHead), TypeAdapter(JobEnd)
_HeadT = TypeVar("_HeadT", bound=ResponseHead)


def _is_passed(name: str, text: str) -> bool:
    return any(re.fullmatch(known, name) and re.fullmatch(texts, text) for known, texts in _PASSED)


def read_head(raw: bytes) -> ResponseHead:
    """Return the head of a response. Raises FormatError."""
    return _check(read_fields(_HEAD, raw, "its head", _MAX_HEAD))


def read_answer_head(raw: bytes) -> AnswerHead:
    """Return the head of an answer to a request without a job. Raises FormatError."""
    return _check(read_fields(_ANSWER, raw, "its head", _MAX_HEAD))


def read_job_end(raw: bytes) -> JobEnd:
    """Return the reason that a job was given up. Raises FormatError."""
    return read_fields(_END, raw, "its end", _MAX_HEAD)


def _check(head: _HeadT) -> _HeadT:
    head.check()
    return head


def build_bad_response_error(error: FormatError) -> ApiError:
    """Return the response if that of a worker is not valid."""
    message = f"the response of a worker is not valid: {error.message}"
    return ApiError(502, message, code="bad_response")

"""Bodies of requests with pictures: JSON with texts, or a form (RFC 7578) with files.

The number of requests with pictures is limited before their bodies are read.
"""

from __future__ import annotations

import asyncio
import io
import re
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from clowder_aimage.api.picture import source as picture_source
from clowder_aimage.api.picture.source import KEYS, NAMES
from clowder_aimage.api.request_body import (
    ABSENT_IN_FORMS,
    build_field_error,
    read_local_fields,
    read_object,
)
from clowder_aimage.engine.admission import CallerSemaphore
from clowder_aimage.engine.executor import run_io
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.body_stream import build_size_error, check_coding, check_type
from clowder_aimage.http.local_request import LocalRequest, Request
from clowder_aimage.http.operation import BODY
from clowder_aimage.pictures.input_file import MAX_BYTES

# Bytes of a request with its pictures
MAX_BODY = 96 << 20
# Seconds for a body with pictures to arrive
TIMEOUT = 120.0
# Seconds for a body without
SHORT_TIMEOUT = 30.0
# What a body with pictures must keep, as it holds a place: seconds at first, and bytes a second
GRACE, MIN_SPEED = 10.0, 64 << 10
# Limit of the parts of a form
_MAX_PARTS = 100
# What aiohttp raises for a form
_MALFORMED = (HttpProcessingError, ValueError, LookupError, AssertionError, RuntimeWarning)
_FORM = "multipart/form-data"
# The name of one of several files: image[] or image[0]
_INDEX = re.compile(r"\[\d*\]$")
# Bytes of a part read at a time, so that a large file is refused early
_CHUNK = 1 << 16


class BodyGate(Protocol):
    """Limits the requests with pictures: ``busy`` those whose bodies are parsed at once."""

    @property
    def busy(self) -> CallerSemaphore: ...

    def enter(self) -> None:
        """Count a request with pictures. Raises BusyError, StoppedError."""


@dataclass(slots=True, eq=False)
class PictureBody:
    """The body of a request. ``is_form``: its values are texts and files."""

    request: Request
    gate: BodyGate
    is_counted: bool = False
    is_form: bool = False
    _size: int = 0
    _entered: float = 0.0

    def enter(self) -> None:
        """Count the request as one with pictures. Raises BusyError."""
        if not self.is_counted:
            self.gate.enter()
            self.is_counted = True
            self._entered = asyncio.get_running_loop().time()

    async def read_fields(self, *, may_be_form: bool = False) -> dict[str, Any]:
        """Return the fields of the body: JSON, or a form if it may be one.

        Raises:
            ApiError: 400, 408, 413 or 415.
            BusyError: Too many requests with pictures are being served.
        """
        request = self.request
        if isinstance(request, LocalRequest):
            return self._read_local(request, may_be_form=may_be_form)
        check_coding(request)
        if (request.content_length or 0) > MAX_BODY:
            raise build_size_error()
        self.is_form = may_be_form and request.content_type == _FORM
        try:
            if self.is_form:
                self.enter()
                async with asyncio.timeout(GRACE) as limit:
                    return await self._read_form(request, limit)
            return await self._read_object(request, *([_FORM] if may_be_form else []))
        except TimeoutError:
            raise ApiError(408, "timed out reading the request body", code="timeout") from None

    def _read_local(self, request: LocalRequest, *, may_be_form: bool) -> dict[str, Any]:
        self.is_form = may_be_form and request.is_form
        fields = read_local_fields(request)
        if self.is_form or request.exceeds(BODY):
            if request.exceeds(MAX_BODY) or not (self.is_form or fields.keys() & {*NAMES}):
                raise build_size_error()
            self.enter()
        return fields

    async def _read_object(self, request: web.Request, *other_types: str) -> dict[str, Any]:
        if request.body_exists and request.content_length != 0:
            check_type(request, *other_types)
        if (request.content_length or 0) > BODY:
            self.enter()
        pieces = list[bytes]()
        async with asyncio.timeout(GRACE if self.is_counted else SHORT_TIMEOUT) as limit:
            async for piece in request.content.iter_any():
                pieces.append(piece)
                if self._size + len(piece) > BODY:
                    self.enter()
                self._take(len(piece), limit)
        if self._size <= BODY:
            return read_object(b"".join(pieces))
        async with self.gate.busy:
            return await run_io(_read_large_object, pieces)

    def _take(self, count: int, limit: asyncio.Timeout) -> None:
        self._size += count
        if self._size > MAX_BODY:
            raise build_size_error()
        self.request["body"].add(count)
        if self.is_counted:
            limit.reschedule(self._entered + min(TIMEOUT, GRACE + self._size / MIN_SPEED))

    async def _read_form(self, request: web.Request, limit: asyncio.Timeout) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        try:
            reader = await request.multipart()
            for _ in range(_MAX_PARTS):
                field = await reader.next()
                if field is None:
                    return fields
                if not isinstance(field, BodyPartReader) or not field.name:
                    raise ValueError
                name = _INDEX.sub("", field.name)
                value = await self._read_value(field, name, limit)
                if name in NAMES:
                    # No file is chosen
                    if not value or value in ABSENT_IN_FORMS:
                        continue
                    fields.setdefault(name, []).append(value)
                elif fields.setdefault(name, value) is not value:
                    raise build_field_error(name[:60], "is given twice")
        except _MALFORMED:
            pass
        message = f"the form is malformed, or has more than {_MAX_PARTS} parts"
        raise ApiError(400, message, code="invalid_body")

    async def _read_value(
        self, field: BodyPartReader, name: str, limit: asyncio.Timeout
    ) -> str | bytes:
        kind = field.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        is_file = name in NAMES and field.filename is not None
        if is_file:
            picture_source.check_type(name, kind)
        # Joined pieces would be two copies, and leave as much unused memory to the process
        content = io.BytesIO()
        while piece := await field.read_chunk(_CHUNK):
            self._take(len(piece), limit)
            content.write(piece)
            if content.tell() > (MAX_BYTES if name in NAMES else BODY):
                raise ApiError(413, f"{name[:60]} is too large", code="too_large", param=name[:60])
        data = content.getvalue()
        # Browsers send no name if none is chosen
        if is_file and field.filename and not data:
            raise build_field_error(name, "is an empty file", "invalid_image")
        # Some clients send no names of files
        if is_file or (name in NAMES and picture_source.detect_type(data)):
            return data
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise build_field_error(name[:60], "is not text in UTF-8") from None


def _read_large_object(pieces: list[bytes]) -> dict[str, Any]:
    """Return the JSON object of a body; ``pieces`` is emptied to save memory. Raises ApiError."""
    raw = b"".join(pieces)
    pieces.clear()
    # Only bodies with pictures may be this large
    if not any(key in raw for key in KEYS):
        raise build_size_error()
    return read_object(raw, MAX_BODY)

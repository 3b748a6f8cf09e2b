"""The types of fields that other programs of a fleet write, and the strict reader of their JSON.

A worker may be hostile, or of another version: all that it sends is input. Unknown fields are those
of a later version, and ignored. A value never has another type than its field.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci import Reference, read_json
from clowder_aimage.oci.digest import PATTERN

# Bytes of a JSON text; the smallest limit of a NATS server for a message.
MAX_TEXT = 1 << 20
# Characters of a text from another program in a log or on a terminal.
_MAX_SHOWN = 64
STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_COUNT = 1 << 53
_T = TypeVar("_T")


def is_id(text: str) -> bool:
    """Return True if a text may be the id of a worker or a job: one part of a subject of NATS."""
    return _ID.fullmatch(text) is not None


def _check_reference(text: str) -> str:
    try:
        Reference.parse(text)
    except UsageError as error:
        raise ValueError(error.message) from None
    return text


def is_line(text: str) -> bool:
    """Return True for a short text without characters that control a terminal or a direction."""
    return len(text) <= 1024 and text.isprintable()


def _check_line(text: str) -> str:
    if not is_line(text):
        raise ValueError("it has control characters")
    return text


Id = Annotated[str, Field(pattern=rf"^{_ID.pattern}$")]
DigestText = Annotated[str, Field(pattern=rf"^(?:{PATTERN})$")]
ReferenceText = Annotated[str, Field(max_length=1024), AfterValidator(_check_reference)]
Line = Annotated[str, Field(max_length=256), AfterValidator(_check_line)]
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]


def read_fields(adapter: TypeAdapter[_T], raw: bytes, label: str, limit: int = MAX_TEXT) -> _T:
    """Return the value of a JSON text by its type; ``label`` names it in messages.

    Raises FormatError: it is not strict JSON, or a field has another type or is out of bounds.
    """
    # It refuses what the other parser resolves somehow, such as duplicate keys.
    read_json(raw, label, limit)
    try:
        return adapter.validate_json(raw, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, fault["loc"]))
        place = f" in {escape_text(field)}" if field else ""
        raise FormatError(f"{label} is invalid{place}: {escape_text(fault['msg'], 200)}") from None


def escape_text(text: str, limit: int = _MAX_SHOWN) -> str:
    """Return a text of another program for people: short, without control characters."""
    shown = text if len(text) <= limit else f"{text[:limit]}..."
    return shown if shown.isprintable() else ascii(shown)[1:-1]

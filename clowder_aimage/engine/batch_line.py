"""A line of a batch: a request in JSON (OpenAI, "Batch API")."""

from __future__ import annotations

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from typing import Any, Literal, get_args

from clowder_aimage.document.unicode_text import INVALID, find_invalid_text
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import read_json

Url = Literal[
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
]
URLS: tuple[str, ...] = get_args(Url)
# Bytes of a request, and values in its JSON
MAX_LINE, MAX_VALUES = 16 << 20, 100_000
# Requests and bytes of a batch (OpenAI, "Batch API")
MAX_LINES, MAX_FILE = 50_000, 200 << 20
# The last states of a batch
OVER = ("completed", "failed", "cancelled", "expired")
# Codes of requests that a batch has not sent
UNSENT = ("batch_cancelled", "batch_expired")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request, whose line has ``size`` bytes."""

    custom_id: str
    url: str
    body: dict[str, Any]
    size: int = 0


def read_line(line: bytes) -> BatchRequest:
    """Return the request in a line. Raises FormatError."""
    if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise FormatError("the file is in UTF-16; save it in UTF-8")
    line = line.removeprefix(BOM_UTF8)
    value = read_json(line, "the request", MAX_LINE, MAX_VALUES)
    if find_invalid_text(value, line) is not None:
        raise FormatError(f"the request {INVALID}")
    try:
        name, url, body = value["custom_id"], value["url"], value["body"]
        method = value.get("method", "POST")
    except (AttributeError, KeyError, TypeError):
        raise FormatError("expected an object with custom_id, method, url and body") from None
    if not isinstance(name, str) or not name:
        raise FormatError("custom_id must be a text")
    if method != "POST" or url not in URLS:
        raise FormatError(f"method must be POST, and url one of {', '.join(URLS)}")
    if not isinstance(body, dict) or body.get("stream"):
        raise FormatError("body must be an object without stream")
    return BatchRequest(name, url, body, len(line))

"""Texts that UTF-8 can encode: escapes in JSON, and bytes in headers, can make others."""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from typing import Any

from clowder_aimage.errors import FormatError

# The escape of a surrogate. A pair of them is a character
_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
INVALID = "contains characters that are not valid Unicode"


def recode_file(raw: bytes) -> bytes:
    """Return a file that a person wrote in UTF-8, without a byte order mark.

    Editors and shells of Windows write such marks, and UTF-16 after them. Raises
    UnicodeDecodeError.
    """
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return raw.decode("utf-16").encode()
    return raw.removeprefix(BOM_UTF8)


def encode_text(text: str, label: str) -> bytes:
    """Return a text in UTF-8. Raises FormatError if it has half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{label} {INVALID}") from None


def find_invalid_text(value: Any, raw: bytes) -> tuple[int | str, ...] | None:
    """Return the path to the first text in the JSON ``raw`` that UTF-8 cannot encode, or None.

    A key that it cannot encode is the last step of its path. ``value`` is the value of the JSON.
    """
    return _find(value) if _ESCAPE.search(raw) else None


def _find(value: Any) -> tuple[int | str, ...] | None:
    if isinstance(value, str):
        return None if is_valid_text(value) else ()
    steps = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for step, nested in steps:
        if isinstance(step, str) and not is_valid_text(step):
            return (step,)
        if (path := _find(nested)) is not None:
            return (step, *path)
    return None


def is_valid_text(text: str) -> bool:
    """Return True if UTF-8 can encode a text."""
    return _SURROGATE.search(text) is None

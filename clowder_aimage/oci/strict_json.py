"""Strict JSON, which all parsers read alike (RFC 8259, RFC 7493)."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from clowder_aimage.errors import FormatError

_NESTS = {dict, list}
MAX_NESTING = 100  # levels of lists and objects, also safe for recursive encoders


def read_json(raw: bytes, what: str) -> Any:
    """Return the value of a JSON text; ``what`` is its name in messages.

    Raises:
        FormatError: it is not UTF-8, not JSON (which has no NaN or infinity), nested too deeply, or
            has a duplicate key in an object, which parsers resolve differently.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        if not is_too_deep(value):
            return value
    except RecursionError:
        pass
    except ValueError as error:
        raise FormatError(f"{what} is not valid JSON: {error}") from None
    raise FormatError(f"{what} is nested more than {MAX_NESTING} levels deep")


def is_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than ``MAX_NESTING`` levels deep."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            item
            for outer in level
            if type(outer) in _NESTS
            for item in (outer.values() if type(outer) is dict else outer)
            if type(item) in _NESTS
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {twice[:60]!r} in an object")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:60]} is too large")
    return value

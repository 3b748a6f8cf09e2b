"""JSON that means the same to every reader (RFC 8259, RFC 7493)."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from clowder_aimage.errors import FormatError

_NESTS = {dict, list}
MAX_NESTING = 100  # of lists and objects; whatever writes JSON by recursion can write that again


def read_json(raw: bytes, what: str) -> Any:
    """The value that ``raw`` is; ``what`` it should have been is told where it is none.

    Raises:
        FormatError: not UTF-8, not JSON (``NaN`` is none, and what is read as infinite would be
            written as no JSON), nested too deep, or an object has a key twice, of which one reader
            would believe the first and another the last.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from None
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
            return value
    raise _too_deep(what)


def _too_deep(what: str) -> FormatError:
    return FormatError(f"{what} is nested more than {MAX_NESTING} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {twice[:60]!r} twice")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:60]} is too large a number")
    return value

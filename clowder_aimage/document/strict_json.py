"""Strict JSON: the texts that all parsers read alike (RFC 8259, RFC 7493).

This is the only reader of JSON from outside. Its values are bounded in bytes and depth, and have
only numbers that fit a double, so that no later arithmetic meets an integer of 400 digits.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NoReturn, TypeVar

from clowder_aimage.errors import FormatError

_T = TypeVar("_T")
_NESTS = {dict, list}
# Levels of lists and objects. Recursive encoders are safe at this depth, too.
MAX_NESTING = 100
# The distribution-spec asks registries to accept 4 MB.
MAX_DOCUMENT_SIZE = 4 * 1024 * 1024
# Approximate. The smallest values, {} and [], take 72 bytes in memory and 3 as text.
MAX_VALUES = 4_000_000
_SEPARATORS = (b",", b"[", b"{")
# Digits of an integer that is finite as a double.
_MAX_DIGITS = 308


def read_json(
    raw: bytes, label: str, limit: int = MAX_DOCUMENT_SIZE, max_values: int | None = None
) -> Any:
    """Return the value of a JSON text of up to ``limit`` bytes; ``label`` names it in messages.

    Raises:
        FormatError: it is too large, not UTF-8, not JSON (no NaN, no infinity), nested too deeply,
            has a number that is not finite as a double, or a duplicate key in an object (parsers
            resolve these differently).
    """
    check_size(raw, label, limit, max_values)
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
        if not is_too_deep(value):
            return value
    except RecursionError:
        pass
    except ValueError as error:
        raise FormatError(f"{label} is not valid JSON: {error}") from None
    raise FormatError(f"{label} is nested more than {MAX_NESTING} levels deep")


def check_size(raw: bytes, label: str, limit: int, max_values: int | None = None) -> None:
    """Raise FormatError if a JSON text is longer than ``limit`` bytes, or has too many values."""
    if len(raw) > limit:
        raise FormatError(f"{label} is too large: {len(raw)} bytes, the limit is {limit}")
    max_values = MAX_VALUES if max_values is None else max_values
    if len(raw) > 2 * max_values and sum(map(raw.count, _SEPARATORS)) > max_values:
        raise FormatError(f"{label} is too large: more than {max_values} values")


@dataclass(slots=True)
class _Parsed:
    """A document's value or error, once its first reader has released the lock."""

    lock: Lock = field(default_factory=Lock)
    size: int = -1
    value: Any = None
    error: FormatError | None = None


class ParseCache:
    """The values of parsed documents by their digests, so that each document is parsed once.

    The least recently used are dropped when their texts exceed ``limit`` bytes. Readers of the same
    document wait for its first one.
    """

    def __init__(self, limit: int = 2 * MAX_DOCUMENT_SIZE) -> None:
        self._left = limit
        self._lock = Lock()
        self._documents: dict[Hashable, _Parsed] = {}

    def get(self, key: Hashable, size: int, parse: Callable[[], _T]) -> _T:
        """Return the value of a document of ``size`` bytes. Raises the FormatError of ``parse``."""
        with self._lock:
            # The entry becomes the last one: a dict keeps the order of insertion.
            document = self._documents[key] = self._documents.pop(key, _Parsed())
        with document.lock:
            if document.size < 0:
                try:
                    document.value = parse()
                except FormatError as error:
                    document.error = error.with_traceback(None)
                self._keep(document, size)
        # A copy, because raising an error changes its traceback, and threads share this one.
        if document.error is not None:
            raise copy(document.error) from None
        value: _T = document.value
        return value

    def _keep(self, parsed: _Parsed, size: int) -> None:
        with self._lock:
            parsed.size = size
            self._left -= size
            while self._left < 0:
                oldest = next(
                    key for key, document in self._documents.items() if document.size >= 0
                )
                self._left += self._documents.pop(oldest).size


def is_too_deep(value: Any) -> bool:
    """Return True if lists and objects are nested more than ``MAX_NESTING`` levels deep."""
    # By level instead of by recursion, which would overflow the stack on the input it looks for.
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


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {twice[:60]!r} in an object")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:60]} is too large")
    return value


def _parse_integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"the number {text[:60]} is too large")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object,
    parse_constant=_reject_constant,
    parse_float=_parse_float,
    parse_int=_parse_integer,
)

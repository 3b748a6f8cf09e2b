"""Where in a JSON text its values stand (RFC 8259), for messages that point at a line.

``json`` forgets places. What is here is slower and builds no values; it is for a text in which
something is wrong.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from clowder_aimage.errors import FormatError
from clowder_aimage.oci.strict_json import MAX_NESTING

Path = tuple[str | int, ...]
"""The keys and positions that lead to a value; of the whole it is empty."""
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LINE_FEED = re.compile("\n")
_WORD = re.compile(r"true|false|null")
_MAX_DIGITS = 4300  # of a number: what Python converts; others take far fewer


class NotJSONError(FormatError):
    """A text is not JSON; ``offset`` is the character from which on it is not."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(slots=True)
class Positions:
    """Characters of a text: where the wanted values begin (in an object, their keys), and the keys
    that stand in their object for a second time."""

    of: dict[Path, int] = field(default_factory=dict)
    twice: list[tuple[Path, int]] = field(default_factory=list)


def pointer(path: Path) -> str:
    """A path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


class LineIndex:
    """Where people find a character of a text."""

    def __init__(self, text: str) -> None:
        self._ends = [match.start() for match in _LINE_FEED.finditer(text)]

    def find(self, offset: int) -> tuple[int, int]:
        """Line and column; both count from 1."""
        line = bisect.bisect_left(self._ends, offset)
        return line + 1, offset - (self._ends[line - 1] if line else -1)


def find_positions(text: str, wanted: Collection[Path]) -> Positions:
    """Look for the ``wanted`` paths, and for keys that stand twice.

    Raises:
        NotJSONError: the text is not JSON, or nested deeper than ``read_json`` takes.
    """
    found = Positions()
    end = _space(text, _value(text, _space(text, 0), (), found, frozenset(wanted)))
    if end != len(text):
        raise NotJSONError("something follows the document", end)
    return found


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value(text: str, at: int, path: Path, found: Positions, wanted: frozenset[Path]) -> int:
    """Pass over the value that begins ``at``; where it ends."""
    if path in wanted:
        found.of.setdefault(path, at)
    start = text[at : at + 1]
    if start in ("{", "["):
        if len(path) >= MAX_NESTING:
            raise NotJSONError(f"nested more than {MAX_NESTING} deep", at)
        return (_object if start == "{" else _list)(text, at + 1, path, found, wanted)
    if start == '"':
        return _string(text, at)[1]
    match = _NUMBER.match(text, at) or _WORD.match(text, at)
    if match is None:
        raise NotJSONError("no value begins here" if start else "the text ends too early", at)
    if match.end() - at > _MAX_DIGITS or abs(_as_float(match[0])) == float("inf"):
        raise NotJSONError("too large a number", at)
    return match.end()


def _as_float(text: str) -> float:
    return float(text) if text[0] in "-0123456789" and not text.lstrip("-").isdecimal() else 0.0


def _string(text: str, at: int) -> tuple[str, int]:
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise NotJSONError(error.msg[:1].lower() + error.msg[1:], error.pos) from None
    return str(value), end


def _object(text: str, at: int, path: Path, found: Positions, wanted: frozenset[Path]) -> int:
    seen: set[str] = set()
    at = _space(text, at)
    if text[at : at + 1] == "}":
        return at + 1
    while True:
        if text[at : at + 1] != '"':
            raise NotJSONError("a key in double quotes must stand here", at)
        key, end = _string(text, at)
        inner = (*path, key)
        if key in seen:
            found.twice.append((inner, at))
        seen.add(key)
        if inner in wanted:
            found.of[inner] = at  # of two the last counts, as for most readers
        end = _space(text, end)
        if text[end : end + 1] != ":":
            raise NotJSONError("a colon must stand here", end)
        end = _space(text, _value(text, _space(text, end + 1), inner, found, wanted))
        if text[end : end + 1] == "}":
            return end + 1
        at = _next(text, end, "}")


def _list(text: str, at: int, path: Path, found: Positions, wanted: frozenset[Path]) -> int:
    at = _space(text, at)
    if text[at : at + 1] == "]":
        return at + 1
    position = 0
    while True:
        end = _space(text, _value(text, at, (*path, position), found, wanted))
        if text[end : end + 1] == "]":
            return end + 1
        at = _next(text, end, "]")
        position += 1


def _next(text: str, at: int, closing: str) -> int:
    """Pass over a comma and the space behind it."""
    if text[at : at + 1] != ",":
        raise NotJSONError(f"a comma or {closing} must stand here", at)
    return _space(text, at + 1)

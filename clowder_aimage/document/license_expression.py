"""Licence expressions of SPDX 3.0.1 (annex "SPDX license expressions").

The identifiers are those of SPDX's list, ``license_list.json``. What the list lacks, such as a
value of a model card, is read as a licence of its own: ``gemma`` as ``LicenseRef-gemma``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError

# Characters of an expression, and levels of its parentheses
MAX_LENGTH = 2000
_MAX_DEPTH = 30
_LIST = Path(__file__).with_name("license_list.json")
_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")
_OWN = re.compile(
    r"(?:DocumentRef-[a-z0-9.-]+:)?(?:LicenseRef|AdditionRef)-[a-z0-9.-]+", re.IGNORECASE
)
# The value of a model card
_NAME = re.compile(r"(?!\w+Ref-)[A-Za-z0-9][A-Za-z0-9._+-]*", re.IGNORECASE)
_REF, _ADDITION = "LicenseRef-", "AdditionRef-"


@dataclass(frozen=True, slots=True)
class License:
    """A licence, perhaps this version ``or_later``, perhaps with an exception.

    ``id`` and ``exception`` are spelt as in SPDX's list; ``is_listed`` if that has both.
    """

    id: str
    or_later: bool = False
    exception: str = ""
    is_listed: bool = True

    def __str__(self) -> str:
        text = f"{self.id}+" if self.or_later else self.id
        return f"{text} WITH {self.exception}" if self.exception else text


@dataclass(frozen=True, slots=True)
class Compound:
    """Expressions that all apply (``AND``), or of which one may be chosen (``OR``)."""

    operator: str
    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        parts = (f"({part})" if isinstance(part, Compound) else str(part) for part in self.parts)
        return f" {self.operator} ".join(parts)


Expression = License | Compound


def parse_expression(text: str) -> Expression:
    """Return the expression in a text. Raises FormatError: there is none."""
    if len(text) > MAX_LENGTH:
        raise FormatError(f"a licence of {len(text)} characters is too long")
    parser = _Parser(text)
    expression = parser.parse_or(0)
    if parser.token is not None:
        raise FormatError(f"{text[:100]!r} is no licence expression: unexpected {parser.token!r}")
    return expression


def parse_license(text: str) -> License:
    """Return the licence in a text without AND and OR. Raises FormatError."""
    expression = parse_expression(text)
    if not isinstance(expression, License):
        raise FormatError(f"{text[:100]!r} has several licences")
    return expression


def list_licenses(expression: Expression) -> Iterator[License]:
    """Yield each licence of an expression, in its order."""
    if isinstance(expression, License):
        yield expression
    else:
        for part in expression.parts:
            yield from list_licenses(part)


def build_reference(name: str) -> str:
    """Return the reference to a licence that SPDX does not list, by its name."""
    return name if _OWN.fullmatch(name) else _REF + _clean(name)


def list_identifiers() -> Sequence[str]:
    """Return the identifiers of SPDX's list, without those of exceptions."""
    return tuple(_read_list()[0].values())


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = iter(_TOKEN.findall(text))
        self.token: str | None = next(self._tokens, None)

    def parse_or(self, depth: int) -> Expression:
        return self._parse_all("OR", depth)

    def _parse_all(self, operator: str, depth: int) -> Expression:
        parts = [self._parse_part(operator, depth)]
        while self._take(operator):
            parts.append(self._parse_part(operator, depth))
        return parts[0] if len(parts) == 1 else Compound(operator, tuple(parts))

    def _parse_part(self, operator: str, depth: int) -> Expression:
        # AND binds more strongly than OR, and WITH than both.
        return self._parse_all("AND", depth) if operator == "OR" else self._parse_one(depth)

    def _parse_one(self, depth: int) -> Expression:
        if self._take("("):
            if depth == _MAX_DEPTH:
                raise FormatError("a licence has too many parentheses")
            expression = self.parse_or(depth + 1)
            if not self._take(")"):
                raise self._build_error("a parenthesis is not closed")
            return expression
        found = self._find_license(self._take_word())
        if not self._take("WITH"):
            return found
        exception, is_listed = self._find_exception(self._take_word())
        return License(found.id, found.or_later, exception, found.is_listed and is_listed)

    def _take(self, token: str) -> bool:
        # Operators are in upper or lower case, not mixed.
        if self.token not in (token, token.lower()):
            return False
        self.token = next(self._tokens, None)
        return True

    def _take_word(self) -> str:
        word = self.token
        if word is None or word in "()" or word.upper() in ("AND", "OR", "WITH"):
            raise self._build_error("a licence is missing")
        self.token = next(self._tokens, None)
        return word

    def _find_license(self, word: str) -> License:
        if _OWN.fullmatch(word):
            return License(word, is_listed=False)
        plain = word.removesuffix("+")
        # A deprecated identifier such as GPL-2.0+ has another name.
        for name in (f"{plain}-or-later",) if plain != word else (f"{word}-only", word):
            if (listed := _find(name)) is not None:
                return License(listed)
        if plain != word and (listed := _find(plain)) is not None:
            return License(listed, or_later=True)
        if not _NAME.fullmatch(word):
            raise self._build_error(f"{word[:60]!r} is no licence")
        return License(_REF + _clean(word), is_listed=False)

    def _find_exception(self, word: str) -> tuple[str, bool]:
        listed = _read_list()[1].get(word.lower())
        if listed is not None:
            return listed, True
        if not _OWN.fullmatch(word) and not _NAME.fullmatch(word):
            raise self._build_error(f"{word[:60]!r} is no exception")
        return word if _OWN.fullmatch(word) else _ADDITION + _clean(word), False

    def _build_error(self, reason: str) -> FormatError:
        return FormatError(f"{self._text[:100]!r} is no licence expression: {reason}")


def _find(name: str) -> str | None:
    return _read_list()[0].get(name.lower())


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name)


@functools.cache
def _read_list() -> tuple[dict[str, str], dict[str, str]]:
    """Return the identifiers of licences and of exceptions by their lower case."""
    value = read_json(_LIST.read_bytes(), _LIST.name)
    licenses, exceptions = (
        {name.lower(): name for name in value[key]} for key in ("licenses", "exceptions")
    )
    return licenses, exceptions

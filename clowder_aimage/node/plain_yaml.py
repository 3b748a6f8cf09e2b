"""YAML that means the same to every reader, and where its values stand.

Of YAML 1.2.2 that is what JSON can say: no aliases (a few lines of them unfold to gigabytes), no
tags (some readers make any object of Python's out of them), no keys that stand twice or are no
text, one document. Plain words mean what the core schema (10.3.2 "Tag Resolution") says, so that
``no`` and ``2026-01-31`` are texts. Octal and hexadecimal numbers are texts, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml  # type: ignore[import-untyped]

from clowder_aimage.errors import FormatError
from clowder_aimage.oci.position import Path

MAX_DEPTH = 20  # of lists and objects
_MAX_DIGITS = 18
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(rf"[-+]?[0-9]{{1,{_MAX_DIGITS}}}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,3})?")


class NotYAMLError(FormatError):
    """A text is no YAML of this kind; ``line`` counts from 1 and is 0 where nobody knows it."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class YamlValue:
    """A value, and the lines in which it and what it holds begin (an object's value: its key)."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)


def read_yaml(text: str) -> YamlValue:
    """The value that ``text`` is; None where it says nothing. Raises NotYAMLError."""
    reader = _Reader(text)
    try:
        return YamlValue(reader.document(), reader.lines)
    except yaml.YAMLError as error:
        raise _broken(error, text) from None


def _broken(error: Any, text: str) -> NotYAMLError:
    """What the parser says, as one sentence. A character that YAML forbids has an offset only."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        said = getattr(error, "problem", None) or getattr(error, "context", None) or "no YAML"
        return NotYAMLError(str(said), mark.line + 1)
    forbidden = re.search(
        "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text
    )
    if forbidden is None:
        return NotYAMLError("no YAML", 0)
    line = text.count("\n", 0, forbidden.start()) + 1
    return NotYAMLError(f"a character that YAML forbids: {forbidden[0]!a}", line)


class _Reader:
    """Builds values from the events of a parser, and stops at the first that it does not take."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Path, int] = {}
        self._events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)

    def document(self) -> Any:
        """The only document."""
        value, documents = None, 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _refused("a second document begins: put all in one", event)
                value = self._value(next(self._events), ())
        return value

    def _value(self, event: Any, path: Path) -> Any:
        self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases (*name) are not taken here: write it out", event)
        if event.tag is not None:
            raise _refused(f"the tag {event.tag[:60]!a} is not taken here: leave it out", event)
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event.value) if event.implicit[0] else event.value
        if len(path) >= MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} deep", event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(path)
        return self._object(path)

    def _list(self, path: Path) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            found.append(self._value(event, (*path, len(found))))
        return found

    def _object(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event)
            if key in found:
                raise _refused(f"the key {key[:60]!a} stands twice", event)
            self.lines[(*path, key)] = event.start_mark.line + 1
            found[key] = self._value(next(self._events), (*path, key))
        return found

    def _key(self, event: Any) -> str:
        key = self._value(event, ()) if isinstance(event, yaml.ScalarEvent) else None
        if not isinstance(key, str):
            raise _refused("a key is one text: put what looks like something else in quotes", event)
        return key


def _scalar(text: str) -> Any:
    """What a plain word means."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not math.isinf(float(text)):
        return float(text)
    return text


def _refused(message: str, event: Any) -> NotYAMLError:
    return NotYAMLError(message, event.start_mark.line + 1)

"""A long list in a JSON object, parsed in parts: all its values take ten times the memory."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

from clowder_aimage.document.strict_json import check_size, read_json
from clowder_aimage.errors import FormatError

# Bytes that are parsed together
_CHUNK = 64 * 1024
# Where a list of objects can be divided. Within a string or an object, what is before is no list.
_BOUNDARY = re.compile(rb"\}[ \t\n\r]*,[ \t\n\r]*(?=\{)")
_MAX_ATTEMPTS = 3
_SPACES = b" \t\n\r,"


class LongList(Collection[Any]):
    """The items of a list, parsed anew whenever they are iterated."""

    def __init__(self, raw: bytes, label: str) -> None:
        self._raw, self._label = raw, label
        self._bounds = array("Q")
        self._rest: list[Any] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for start, end in pairwise(self._bounds):
            yield from self._parse(start, end)
        yield from self._rest

    def __contains__(self, item: object) -> bool:
        return any(item == other for other in self)

    def read(self, key: str, visit: Callable[[list[Any]], object]) -> dict[str, Any] | None:
        """Find the parts of the list; return the object with it, None if it has no such list.

        ``visit`` is called with the items of each part, in order. Raises FormatError.
        """
        begin = re.search(rb'"%s"[ \t\n\r]*:[ \t\n\r]*\[' % re.escape(key.encode()), self._raw)
        if begin is None or not self._has_list(head := self._raw[: begin.end()]):
            return None
        self._bounds.append(start := begin.end())
        while (part := self._find_part(start)) is not None:
            start, items = part
            self._bounds.append(start)
            self._count += len(items)
            visit(items)
        value: dict[str, Any] = read_json(head + self._raw[start:], self._label, len(self._raw))
        self._rest, value[key] = value[key], self
        self._count += len(self._rest)
        visit(self._rest)
        return value

    def _has_list(self, head: bytes) -> bool:
        """Return True if a text ends with the start of a list in the outermost object."""
        try:
            read_json(head + b"]}", self._label, len(self._raw) + 2)
        except FormatError:
            return False
        return True

    def _find_part(self, start: int) -> tuple[int, list[Any]] | None:
        """Return the end of a part of the list, and its items; None if the rest is one part."""
        at = start + _CHUNK
        for _ in range(_MAX_ATTEMPTS):
            boundary = _BOUNDARY.search(self._raw, at)
            if boundary is None:
                break
            at = boundary.end()
            try:
                return at, self._parse(start, at)
            except FormatError:
                continue
        return None

    def _parse(self, start: int, end: int) -> list[Any]:
        text = b'{"":[' + self._raw[start:end].rstrip(_SPACES) + b"]}"
        value = read_json(text, self._label, len(text))
        if len(value) != 1:
            raise FormatError(f"{self._label} has another list there")
        items: list[Any] = value[""]
        return items


def read_long_list(
    raw: bytes, label: str, limit: int, key: str, visit: Callable[[list[Any]], object]
) -> Any:
    """Return a value as ``read_json`` does, in which the list of ``key`` may be a LongList.

    ``visit`` is called with the items of that list, perhaps in parts. Raises FormatError.
    """
    check_size(raw, label, limit)
    value: Any = LongList(raw, label).read(key, visit)
    if value is None:
        value = read_json(raw, label, limit)
        if isinstance(value, dict) and isinstance(items := value.get(key), list):
            visit(items)
    return value

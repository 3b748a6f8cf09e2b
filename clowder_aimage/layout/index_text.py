"""index.json as text: an entry a line, so that one is found or replaced without parsing others."""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import read_json

_SEPARATOR = b",\n"
# Bytes that are compared or searched together, and those that are written
_CHUNK, _PIECE = 64 * 1024, 1024 * 1024
# Entries that are written together
_MAX_TOGETHER = 1000


@dataclass(frozen=True, slots=True)
class EntryLine:
    """An entry, and where its text begins and ends."""

    start: int
    end: int
    entry: Any


def encode_index(value: dict[str, Any]) -> bytes:
    """Return an index as JSON with an entry a line; the order of all fields is kept."""
    return b"".join(iter_encoded(value, value["manifests"]))


def iter_encoded(value: dict[str, Any], entries: Iterable[Any]) -> Iterator[bytes]:
    """Yield the text of ``encode_index`` in parts, with these entries instead of the index's."""
    for number, (key, item) in enumerate(value.items()):
        yield f"{', ' if number else '{'}{json.dumps(key)}: ".encode()
        if key == "manifests":
            yield b"[\n"
            yield from _iter_lines(entries)
            yield b"\n]"
        else:
            yield _encode(item)
    yield b"}\n"


def _iter_lines(entries: Iterable[Any]) -> Iterator[bytes]:
    """Yield the texts of many entries together."""
    texts, is_first = map(_encode, entries), True
    while part := list(islice(texts, _MAX_TOGETHER)):
        yield (b"" if is_first else _SEPARATOR) + _SEPARATOR.join(part)
        is_first = False


def find_lines(raw: Text, texts: Collection[str]) -> list[EntryLine]:
    """Return the entries that have one of these texts as a string, in the order of the index.

    ``raw`` is the result of ``encode_index`` or ``replace_lines``.
    """
    body_start, body_end = _find_body(raw)
    lines: dict[int, EntryLine] = {}
    for text in texts:
        encoded, position = json.dumps(text).encode(), body_start
        while (position := raw.find(encoded, position, body_end)) >= 0:
            start = raw.rfind(b"\n", 0, position) + 1
            position = raw.find(b"\n", position)
            line = raw[start:position].removesuffix(b",")
            lines[start] = EntryLine(start, start + len(line), read_json(line, "index.json"))
    return [lines[start] for start in sorted(lines)]


def replace_lines(
    raw: bytes, lines: Collection[EntryLine], entries: list[Any]
) -> list[bytes | memoryview]:
    """Replace the entries of ``lines``, of ``find_lines``, by ``entries``; return the new text.

    An entry stays at its place, or is replaced there; further ones are added at the end. The text
    is returned in parts: it may have tens of megabytes.
    """
    if len(entries) < len(lines):
        ids = {id(entry) for entry in entries}
        placed = [line.entry if id(line.entry) in ids else None for line in lines]
        known = {id(line.entry) for line in lines}
        added = [entry for entry in entries if id(entry) not in known]
        texts = [b"" if entry is None else _encode(entry) for entry in placed]
    else:
        texts = [_encode(entry) for entry in entries[: len(lines)]]
        added = entries[len(lines) :]
    body_start, body_end = position, _ = _find_body(raw)
    parts = list[bytes | memoryview]()
    for line, text in zip(lines, texts, strict=True):
        parts += [_cut(raw, position, line.start), text]
        position = line.end
    parts += [_cut(raw, position, body_end), *map(_encode, added)]
    view, body = memoryview(raw), [part for part in parts if len(part)]
    separated = [piece for part in body for piece in (_SEPARATOR, part)][1:]
    return [view[:body_start], *separated, view[body_end:]]


def _cut(raw: bytes, start: int, end: int) -> memoryview:
    """Return a part of the text without separators at its ends, and without a copy."""
    while start < end and raw[start] in _SEPARATOR:
        start += 1
    while start < end and raw[end - 1] in _SEPARATOR:
        end -= 1
    return memoryview(raw)[start:end]


def iter_entries(
    text: Text, removed: Mapping[bytes, int] = MappingProxyType({}), added: Collection[bytes] = ()
) -> Iterator[Any]:
    """Yield the entries of ``exchange_lines``, some of which are parsed together."""
    for part in _iter_parts(text, removed, added, _CHUNK):
        yield from read_json(b"[" + part + b"]", "index.json")


def exchange_lines(
    text: Text, removed: Mapping[bytes, int], added: Collection[bytes]
) -> Iterator[bytes]:
    """Yield parts of the text without some entries, and with others at the end.

    The entries are texts. ``removed`` states how often each one is removed.
    """
    start, end = _find_body(text)
    yield text[:start]
    separator = b""
    for part in _iter_parts(text, removed, added, _PIECE):
        yield separator + part
        separator = _SEPARATOR
    yield text[end:]


def _iter_parts(
    text: Text, removed: Mapping[bytes, int], added: Collection[bytes], size: int
) -> Iterator[bytes]:
    """Yield the lines of ``exchange_lines`` in parts of about ``size`` bytes."""
    position, end = _find_body(text)
    counts = Counter(removed)
    while position < end:
        part_end = min(text.find(b"\n", min(position + size, end)), end)
        part = text[position:part_end].rstrip(b",")
        position = part_end + 1
        if counts:
            lines = []
            for line in part.split(_SEPARATOR):
                if counts[line] > 0:
                    counts[line] -= 1
                else:
                    lines.append(line)
            part = _SEPARATOR.join(lines)
        if part:
            yield part
    yield from added


class Text(Protocol):
    """Bytes, or those of a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...

    def find(self, text: bytes, start: int = ..., end: int = ..., /) -> int: ...

    def rfind(self, text: bytes, start: int = ..., end: int = ..., /) -> int: ...


class FileText:
    """The text of an open file, whose parts are read when they are needed. Raises OSError.

    The file is closed with it, or when it is no longer used.
    """

    def __init__(self, fd: int) -> None:
        self.fd, self._size = fd, os.fstat(fd).st_size
        self.close = weakref.finalize(self, os.close, fd)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, end, _ = part.indices(self._size)
        return os.pread(self.fd, max(0, end - start), start)

    def find(self, text: bytes, start: int = 0, end: int | None = None) -> int:
        end = self._size if end is None else end
        while end - start >= len(text):
            stop = min(start + _CHUNK, end)
            if (found := self[start:stop].find(text)) >= 0:
                return start + found
            start = stop - len(text) + 1
        return -1

    def rfind(self, text: bytes, start: int = 0, end: int | None = None) -> int:
        end = self._size if end is None else end
        while end - start >= len(text):
            low = max(start, end - _CHUNK)
            if (found := self[low:end].rfind(text)) >= 0:
                return low + found
            end = low + len(text) - 1
        return -1


def find_changes(old: Text, new: Text) -> tuple[list[Any], list[Any]]:
    """Return the entries that only ``old`` has, and those that only ``new`` has.

    Unchanged ones beside them may be in both. The cost grows with the changed part, but for a
    comparison of bytes.
    """
    old_start, old_end = _find_body(old)
    new_start, new_end = _find_body(new)
    old_end, new_end = old_end + 1, new_end + 1
    limit = min(old_end - old_start, new_end - new_start)
    start = _count_equal(
        limit,
        lambda low, high: (
            old[old_start + low : old_start + high] == new[new_start + low : new_start + high]
        ),
    )
    start = old.rfind(b"\n", old_start, old_start + start) + 1 - old_start if start else 0
    start = max(start, 0)
    rest = _count_equal(
        limit - start,
        lambda low, high: (
            old[old_end - high : old_end - low] == new[new_end - high : new_end - low]
        ),
    )
    # The common end begins at the start of a line
    line_end = old.find(b"\n", max(old_start + start, old_end - rest - 1), old_end)
    rest = old_end - line_end - 1
    return (
        _parse_lines(old[old_start + start : old_end - rest]),
        _parse_lines(new[new_start + start : new_end - rest]),
    )


def _parse_lines(text: bytes) -> list[Any]:
    return [read_json(line.rstrip(b","), "index.json") for line in text.split(b"\n") if line]


def _count_equal(limit: int, is_equal: Callable[[int, int], bool]) -> int:
    """Return how many of ``limit`` bytes are equal, from the first one."""
    low = 0
    while low < limit and is_equal(low, min(low + _CHUNK, limit)):
        low += _CHUNK
    if low >= limit:
        return limit
    high = min(limit, low + _CHUNK)
    while high - low > 1:
        middle = (low + high) // 2
        if is_equal(low, middle):
            low = middle
        else:
            high = middle
    return low


def _encode(entry: Any) -> bytes:
    return json.dumps(entry).encode()


def _find_body(raw: Text) -> tuple[int, int]:
    start, end = raw.find(b"\n") + 1, raw.rfind(b"\n]")
    if start < 1 or end < 0:
        raise FormatError("index.json does not have an entry a line")
    return start, end

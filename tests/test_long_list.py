"""A list that is parsed in parts has the values that it has as a whole, or the same errors."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from clowder_aimage.document import long_list as module
from clowder_aimage.document.long_list import LongList, read_long_list
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError

LIMIT = 1024 * 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 16)


def read(raw: bytes) -> tuple[Any, list[Any]]:
    """Return the value, and what was visited."""
    visited = list[Any]()
    value = read_long_list(raw, "it", LIMIT, "items", visited.extend)
    if isinstance(value, dict) and isinstance(found := value.get("items"), LongList):
        assert len(found) == len(list(found))
        value["items"] = list(found)
    return value, visited


TEXTS: list[Any] = [
    {"items": []},
    {"items": [1, "}, {", [], None]},
    {"items": [{"n": number} for number in range(20)]},
    {"a": {"items": [{"n": 1}, {"n": 2}]}, "items": [{"n": 3}], "z": [{"n": 4}, {"n": 5}]},
    {"items": [{"n": [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 5}]}] * 3},
    {"items": [{"text": "}, {" * 9}, {"n": 2}], "": [{"n": 1}, {"n": 2}]},
    {"items": [{"n": 1}] * 4, "x": [{"n": 1}] * 4},
    {"items": [{"n": 1}] * 4, "": [{"n": 1}] * 4},
    {"x": '"items": [', "items": [{"\u00fc": "\u00fc" * 30}] * 3},
    {"items": {"n": 1}},
    {"items": None},
    {"x": 1},
    [{"items": [{"n": 1}, {"n": 2}]}],
    7,
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("value", TEXTS, ids=range(len(TEXTS)))
def test_a_list_has_the_same_items_in_parts(value: Any, indent: int | None) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    items = value.get("items") if isinstance(value, dict) else None
    assert read(raw) == (value, items if isinstance(items, list) else [])


def test_a_long_list_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def count(raw: bytes, *given: Any) -> Any:
        sizes.append(len(raw))
        return read_json(raw, *given)

    raw = json.dumps({"items": [{"n": number} for number in range(1000)], "x": 1}).encode()
    monkeypatch.setattr(module, "read_json", count)
    assert len(read(raw)[1]) == 1000
    assert len(sizes) > 300 and max(sizes) < 100


def test_damaged_texts_are_refused_as_a_whole_is() -> None:
    draw = random.Random(7)
    for value in TEXTS * 40:
        raw = bytearray(json.dumps(value).encode())
        for _ in range(draw.randrange(1, 3)):
            place = draw.randrange(len(raw) + 1)
            raw[place : place + draw.randrange(3)] = draw.choice([b"", b"}", b"]", b",", b'"'])
        outcomes = list[Any]()
        for parse in (lambda text: read_json(text, "it", LIMIT), lambda text: read(text)[0]):
            try:
                outcomes.append(parse(bytes(raw)))
            except FormatError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1], bytes(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"items": [{"n": 1}, {"n": 2}], "items": [{"n": 3}, {"n": 4}]}',
        b'{"items": [{"n": 1, "n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]}',
        b'{"items": [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]} x',
        b'{"items": [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4},]}',
        b'{"items": [{"n": 1}, {"n": 2}, {"n": NaN}, {"n": 4}]}',
        b'{"items": [{"n": 1}, {"n": "\xff"}, {"n": 3}, {"n": 4}]}',
        b'{"items": [' + b'{"n": 1}, ' * 9 + b'{"n": ' + b"[" * 98 + b"]" * 98 + b'}, {"n": 2}]}',
    ],
)
def test_what_strict_parsers_refuse_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        read_json(raw, "it")
    with pytest.raises(FormatError):
        read(raw)


def test_a_text_beyond_the_limit_is_refused() -> None:
    with pytest.raises(FormatError, match="the limit is 9"):
        read_long_list(b'{"items": []}', "it", 9, "items", lambda _: None)

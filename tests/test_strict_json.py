"""The reader of all JSON from outside: bounds of bytes, values and numbers; the cache of parses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE, MAX_VALUES, ParseCache, read_json
from clowder_aimage.errors import FormatError


@given(st.integers().filter(bool), st.integers(min_value=0, max_value=400))
def test_every_number_is_finite_as_a_double(number: int, exponent: int) -> None:
    for text in (f"{number}{'0' * exponent}", f"{number}e{exponent}"):
        try:
            value = read_json(text.encode(), "it")
        except FormatError as error:
            assert "is too large" in error.message
        else:
            assert abs(float(value)) < float("inf")


def test_a_number_of_400_digits_is_refused() -> None:
    with pytest.raises(FormatError, match=r"the number 10+ is too large"):
        read_json(json.dumps({"parameters": 10**400}).encode(), "it")
    assert read_json(b"%d" % 10**300, "it") == 10**300


def test_a_document_is_bounded_before_it_is_parsed() -> None:
    with pytest.raises(FormatError, match=f"it is too large: {MAX_DOCUMENT_SIZE + 1} bytes"):
        read_json(b"!" * (MAX_DOCUMENT_SIZE + 1), "it")
    with pytest.raises(FormatError, match="it is too large: 3 bytes, the limit is 2"):
        read_json(b"[1]", "it", 2)
    with pytest.raises(FormatError, match=f"more than {MAX_VALUES} values"):
        read_json(b"," * (2 * MAX_VALUES + 1), "it", 4 * MAX_VALUES)


def test_a_document_is_parsed_once_while_it_is_kept() -> None:
    cache, parsed = ParseCache(limit=10), list[str]()

    def read(key: str, size: int) -> str:
        def parse() -> str:
            parsed.append(key)
            return key.upper()

        return cache.get(key, size, parse)

    assert [read("a", 4), read("b", 4), read("a", 4)] == ["A", "B", "A"]
    assert parsed == ["a", "b"]
    read("c", 4)  # b is the least recently used
    assert [read("a", 4), read("c", 4), read("b", 4)] == ["A", "C", "B"]
    assert parsed == ["a", "b", "c", "b"]
    read("large", 11)
    assert parsed == ["a", "b", "c", "b", "large"]


def test_a_refusal_is_kept_too_and_raised_anew() -> None:
    cache, parsed = ParseCache(), list[int]()

    def refuse() -> None:
        parsed.append(1)
        raise FormatError("no", hint="why")

    for _ in range(2):
        with pytest.raises(FormatError, match=r"^no$") as caught:
            cache.get("a", 1, refuse)
        caught.value.message += ", and more"
        assert caught.value.hint == "why"
    assert parsed == [1]


def test_another_failure_is_not_kept() -> None:
    cache = ParseCache()
    with pytest.raises(MemoryError):
        cache.get("a", 1, lambda: (_ for _ in ()).throw(MemoryError))
    assert cache.get("a", 1, lambda: 5) == 5

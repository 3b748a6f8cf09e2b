"""Positions in JSON texts, and invalid JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clowder_aimage.document.schema import MAX_POSITIONED_SIZE, find_json_positions
from clowder_aimage.validate import check

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # no lone surrogate, which UTF-8 cannot encode
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    found = {path: value}
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        found |= paths(inner, (*path, key))
    return found


@given(value=VALUES, indent=st.sampled_from([None, 1, "\t"]), ascii_only=st.booleans())
@example(["\\ud800", "\U0001f600", "\x7f\x85\u2028\ufeff/", {"---": "# & * ? ! | > %"}], 1, True)
def test_positions_of_all_values(value: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    if value and isinstance(value, list) and indent == 1:
        text = text.replace("\n", "\r\n")
    wanted = paths(value)
    positions = find_json_positions(text)
    assert positions.keys() == wanted.keys()
    for path, (at,) in positions.items():
        found, _ = json.JSONDecoder().raw_decode(text, at)
        is_member = path and isinstance(path[-1], str)
        assert found == (path[-1] if is_member else wanted[path])


def test_positions_of_a_key_that_occurs_twice() -> None:
    assert find_json_positions('{"a":1,\n"a":2}') == {(): [0], ("a",): [1, 8]}


@pytest.mark.parametrize("text", ['{"a":' * 900 + "1" + "}" * 900, '{"' + "k" * 2000 + '": 1}'])
def test_texts_without_positions_are_accepted(text: str) -> None:
    assert check("it", text.encode(), "aimage-config").violations


def test_a_large_document_is_checked_without_positions() -> None:
    text = json.dumps({"schemaVersion": 1, "x": "x" * MAX_POSITIONED_SIZE})
    (wrong,) = check("it", text.encode(), "aimage-config").violations
    assert (wrong.pointer, wrong.line) == ("", 0)


def test_a_valid_document_does_not_import_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert not check("it", b'{"schemaVersion":1,"components":{}}').violations


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (b"", "1:1", "not valid JSON: Expecting value"),
        (b'{\n  "a": 1\n  "b": 2\n}', "3:3", "not valid JSON: Expecting ',' delimiter"),
        (b"{} {}", "1:4", "not valid JSON: Extra data"),
        (b"\xef\xbb\xbf{}", "1:1", "not valid JSON: Unexpected UTF-8 BOM (decode using utf-8-sig)"),
        (b'{"a":\n "\xff"}', "2:3", "not valid JSON: not UTF-8"),
        (b'{"a": NaN}', "0:0", "not valid JSON: NaN is not a JSON number"),
        (b'{"a": 1e999}', "0:0", "not valid JSON: the number 1e999 is too large"),
        (b"[" * 3000 + b"]" * 3000, "0:0", "nested more than 100 levels deep"),
    ],
)
def test_invalid_json_is_refused(text: bytes, place: str, message: str) -> None:
    (wrong,) = check("it", text).violations
    assert (wrong.pointer, wrong.message) == ("", message)
    assert f"{wrong.line}:{wrong.column}" == place


def test_a_document_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.document.strict_json.MAX_VALUES", 10)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    (wrong,) = check("it", b'{"a": [' + b"{}," * 99 + b"{}]}").violations
    assert wrong.message == "too large: more than 10 values"

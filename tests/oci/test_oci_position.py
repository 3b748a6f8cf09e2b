"""Where the values of a JSON text stand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import read_json
from clowder_aimage.oci.position import LineIndex, NotJSONError, find_positions, pointer

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # no halves of surrogate pairs: they are no UTF-8
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


@given(value=VALUES, indent=st.none() | st.integers(0, 3), ascii_only=st.booleans())
def test_every_value_is_found_where_it_stands(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    wanted = paths(value)
    positions = find_positions(text, wanted)
    assert positions.of.keys() == wanted.keys()
    for path, at in positions.of.items():
        found, _ = json.JSONDecoder().raw_decode(text, at)
        is_member = path and isinstance(path[-1], str)
        assert found == (path[-1] if is_member else wanted[path])


@given(
    text=st.text('[]{}:,"\\ \n01.-eE+tfnaluNI/é', max_size=30)
    | VALUES.map(json.dumps).flatmap(
        lambda text: st.integers(0, len(text)).map(lambda at: text[:at] + text[at + 1 :])
    )
)
@example("-0")
@example("1.")
@example("01")
@example("[1,]")
@example('"\\u12"')
@example('{"a":1,"a":2}')
def test_it_takes_what_the_reader_takes(text):
    try:
        twice = find_positions(text, ()).twice
    except NotJSONError as error:
        assert 0 <= error.offset <= len(text)
        takes = False
    else:
        takes = not twice
    try:
        read_json(text.encode(), "it")
        reads = True
    except FormatError:
        reads = False
    assert takes == reads


@pytest.mark.parametrize("kind", ["[]", '{"a":}'])
@pytest.mark.parametrize("depth", [99, 100, 101, 5000])
def test_it_is_as_deep_as_the_reader(kind, depth):
    text = kind[:-1] * depth + "1" + kind[-1] * depth
    if depth <= 100:
        find_positions(text, ())
        read_json(text.encode(), "it")
        return
    with pytest.raises(NotJSONError, match="nested more than 100 deep"):
        find_positions(text, ())
    with pytest.raises(FormatError):
        read_json(text.encode(), "it")


def test_keys_that_stand_twice():
    text = '{"a":{"b":1,"b":2,"b":3},"c":1,"a":4}'
    found = find_positions(text, [("a",), ("a", "b"), ("c",), ("d",)])
    assert found.twice == [(("a", "b"), 12), (("a", "b"), 18), (("a",), 31)]
    assert found.of == {("a",): 31, ("a", "b"): 18, ("c",): 25}


@given(text=st.text("a\n", max_size=20), at=st.integers(0, 20))
def test_lines_are_counted_as_editors_do(text, at):
    at = min(at, len(text))
    before = text[:at].split("\n")
    assert LineIndex(text).find(at) == (len(before), len(before[-1]) + 1)


def test_pointers():
    """RFC 6901, section 5."""
    assert pointer(()) == ""
    assert pointer(("foo", 0)) == "/foo/0"
    assert pointer(("",)) == "/"
    assert pointer(("a/b", "m~n", "~1")) == "/a~1b/m~0n/~01"

"""Fields of a JSON object: types, bounds and errors with file and field."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest

from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE
from clowder_aimage.errors import ModelError
from clowder_aimage.tensor.config_fields import MAX_SIZE, ConfigFields, parse_object

Read = Callable[[ConfigFields], object]


def fields(**values: object) -> ConfigFields:
    return ConfigFields("config.json", values)


def refused(read: Callable[[], object], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "nested more than 100 levels deep"),
        (b'{"a": 1%s}' % (b"0" * 400), "not valid JSON: the number 1000"),
        (b" " * (MAX_DOCUMENT_SIZE + 1), "too large"),
    ],
    ids=["open", "bytes", "deep", "number", "size"],
)
def test_invalid_json_is_refused_with_the_file_name(data: bytes, why: str) -> None:
    gc.collect()  # of what others left: a finalizer that runs this deep fails
    refused(lambda: parse_object("index.json", data), f"index.json is {why}")


def test_a_document_must_be_an_object() -> None:
    assert parse_object("index.json", b'{"a": 1}') == {"a": 1}
    refused(lambda: parse_object("index.json", b"[1]"), "index.json must be a JSON object")


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda f: f.get_integer("x"), 1),
        (lambda f: f.get_integer("x"), MAX_SIZE),
        (lambda f: f.get_integer("x", maximum=4), 4),
        (lambda f: f.get_number("x"), 0),
        (lambda f: f.get_number("x"), -1.5),
        (lambda f: f.get_positive("x"), 1e-9),
        (lambda f: f.get_boolean("x", False), True),
        (lambda f: f.get_text("x"), ""),
        (lambda f: f.get_integers("x"), [1, MAX_SIZE]),
        (lambda f: f.get_integers("x"), []),
    ],
)
def test_values_in_bounds_are_returned(read: Read, value: object) -> None:
    expected = tuple(value) if isinstance(value, list) else value
    assert read(fields(x=value)) == expected


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda f: f.get_integer("x"), 0, "must be a whole number from 1 to 16777216"),
        (lambda f: f.get_integer("x"), MAX_SIZE + 1, "must be a whole number"),
        (lambda f: f.get_integer("x", maximum=4), 5, "from 1 to 4"),
        (lambda f: f.get_integer("x"), True, "must be a whole number"),
        (lambda f: f.get_integer("x"), 2.0, "must be a whole number"),
        (lambda f: f.get_number("x"), math.inf, "must be a number"),
        (lambda f: f.get_number("x"), math.nan, "must be a number"),
        (lambda f: f.get_number("x"), True, "must be a number"),
        (lambda f: f.get_number("x"), "1", "must be a number"),
        (lambda f: f.get_number("x"), 10**400, "from -1e+30 to 1e+30"),
        (lambda f: f.get_number("x", minimum=2), 1, "from 2 to 1e+30"),
        (lambda f: f.get_positive("x"), 0, "from 1e-30 to 1e+30"),
        (lambda f: f.get_positive("x"), 1e-320, "from 1e-30 to 1e+30"),
        (lambda f: f.get_positive("x", maximum=1), 2, "from 1e-30 to 1"),
        (lambda f: f.get_boolean("x", False), 1, "must be true or false"),
        (lambda f: f.get_text("x"), 1, "must be a string"),
        (lambda f: f.get_integers("x"), 1, "must be a list"),
        (lambda f: f.get_integers("x"), [1, 0], "must be a list"),
        (lambda f: f.get_integers("x"), [1, True], "must be a list"),
        (lambda f: f.get_integers("x"), [MAX_SIZE + 1], "must be a list"),
        (lambda f: f.check_value("x", "silu"), "gelu", "unsupported, expected 'silu'"),
    ],
)
def test_other_values_are_refused_with_file_and_field(
    read: Read, value: object, message: str
) -> None:
    refused(lambda: read(fields(x=value)), message)
    refused(lambda: read(fields(x=value)), "config.json: x = ")


@pytest.mark.parametrize(
    ("read", "default"),
    [
        (lambda f: f.get_integer("x", 3), 3),
        (lambda f: f.get_number("x", 0), 0.0),
        (lambda f: f.get_boolean("x", True), True),
        (lambda f: f.get_text("x", "a"), "a"),
        (lambda f: f.get_integers("x", (2,)), (2,)),
        (lambda f: f.check_value("x", "silu"), None),
    ],
)
def test_absent_and_null_fields_have_the_default(read: Read, default: object) -> None:
    assert read(fields()) == default
    assert read(fields(x=None)) == default


@pytest.mark.parametrize(
    "name", ["get_integer", "get_number", "get_positive", "get_text", "get_integers"]
)
def test_a_field_without_a_default_is_required(name: str) -> None:
    refused(lambda: getattr(fields(), name)("x"), "config.json: missing field x")


def test_fields_that_were_not_read_are_refused() -> None:
    one = fields(a=1, b=2, c=None, _class_name="X", d=4)
    one.get_integer("a")
    one.finish("b", "d")
    refused(lambda: one.finish("b"), "config.json: unknown fields d")


def test_only_supported_quantization_is_accepted() -> None:
    one = fields(quantization={"bits": 4, "group_size": 64})
    one.accept_quantization()
    one.finish()
    refused(fields(quantization="gptq").accept_quantization, "unsupported quantization")

"""Objects of JSON Schemas get no further properties, unless a schema asks for them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from clowder_aimage.model.llama.closed_schema import close_objects, drop_nulls

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed", "value"),
    [
        (A, CLOSED, {"a": 1}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}, [{"a": 1}]),
        ({**A, "required": ["a"]}, {**CLOSED, "required": ["a"]}, {"a": 1}),
        (
            {"properties": {"properties": A}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
            {"properties": {"a": 1}},
        ),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": A}},
            {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}},
            {"a": 1},
        ),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}, {"a": 1}),
        (
            {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}},
            {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": CLOSED}},
            {"a": 1},
        ),
    ],
    ids=str,
)
def test_stated_objects_are_closed(schema: Any, closed: Any, value: Any) -> None:
    assert close_objects(schema) == closed
    assert jsonschema.Draft202012Validator(closed).is_valid(value)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "minProperties": 3},
        {**A, "required": ["b"]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "anyOf": [{"required": ["b"]}]},
        {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": A}},
        {**A, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
        {"not": A},
        {"enum": [A], "default": A},
    ],
    ids=str,
)
def test_what_asks_for_more_stays_open(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


@pytest.mark.parametrize(
    ("schema", "cleaned"),
    [
        ({**A, "required": None, "$defs": None, "$ref": None, "anyOf": None}, A),
        ({"type": None, "enum": [None, "a"], "minimum": None}, {"enum": [None, "a"]}),
        ({"anyOf": [{"type": "string", "const": None}]}, {"anyOf": [{"type": "string"}]}),
        ({"properties": {"type": {"const": None}}}, {"properties": {"type": {"const": None}}}),
        ({"type": ["string", "null"], "const": None}, {"type": ["string", "null"], "const": None}),
        ({"default": {"a": None}}, {"default": {"a": None}}),
    ],
    ids=str,
)
def test_null_counts_as_absent_in_a_schema(schema: Any, cleaned: Any) -> None:
    assert drop_nulls(schema) == cleaned

"""Rules between fields: the check and the JSON Schema agree."""

from __future__ import annotations

import itertools

import jsonschema
import pytest

from clowder_aimage.api.field_rule import FieldRule, excludes, needs, requires

NAMES = ("a", "b", "c")
RULES = [
    needs("a", "b"),
    requires("a", "b"),
    requires(("a", "b"), "c", words="a picture"),
    excludes("a", "b", "c"),
]


def unset(name: str) -> list[object]:
    return [None, ""] if name == "a" else [None]


@pytest.mark.parametrize("rule", RULES)
def test_the_schema_refuses_the_bodies_that_the_check_refuses(rule: FieldRule) -> None:
    schema = rule.build_schema(NAMES, unset)
    assert schema is not None
    verdicts = set()
    for values in itertools.product((..., None, "x"), repeat=len(NAMES)):
        body = {name: value for name, value in zip(NAMES, values, strict=True) if value != ...}
        present = {name for name in NAMES if body.get(name) not in unset(name)}
        fault = rule.find_fault(present.__contains__)
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(body)
        assert is_valid == (fault is None), body
        verdicts.add(is_valid)
    assert verdicts == {True, False}


def test_a_fault_names_the_field_and_the_reason() -> None:
    assert requires("mask", "image").find_fault(lambda name: name == "mask") == (
        "mask",
        "requires image",
    )
    assert excludes("crop", "expand").find_fault(lambda _: True) == (
        "crop",
        "cannot be combined with expand",
    )
    assert needs("model", "name").find_fault(lambda _: False) == ("model", "is required")


def test_a_body_that_cannot_break_a_rule_has_no_schema() -> None:
    assert excludes("x", "a").build_schema(NAMES, unset) is None
    assert needs("x").build_schema(NAMES, unset) is None

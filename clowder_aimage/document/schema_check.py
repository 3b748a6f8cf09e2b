"""The check of a document against a schema of the project, without jsonschema.

To import that takes longer than to pull a small AImage, and most documents are valid. This decides
by the keywords that the schemas have; jsonschema describes what is wrong.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

# Schemas of other files, by their URL
LoadURL = Callable[[str], Mapping[str, Any]]
_IGNORED = frozenset({"$schema", "$id", "$defs", "$comment", "title", "description", "default"})


class UnknownKeywordError(Exception):
    """A schema has a keyword, or a form of one, that is not known here."""


class SchemaCheck:
    """The check against ``root`` and the schemas that it refers to."""

    def __init__(self, root: Mapping[str, Any], load: LoadURL) -> None:
        self.root, self.load = root, load

    def accepts(self, value: object) -> bool:
        """Return True if a document is valid. Raises UnknownKeywordError."""
        return self.decide(self.root, value)

    def decide(self, schema: Any, value: object) -> bool:
        """Return True if a value is valid against a part of a schema."""
        if isinstance(schema, bool):
            return schema
        for keyword, rule in schema.items():
            if keyword in _IGNORED:
                continue
            check = _CHECKS.get(keyword)
            if check is None:
                raise UnknownKeywordError(keyword)
            if not check(self, rule, value, schema):
                return False
        return True


def _follow(check: SchemaCheck, url: str, value: object, _: Any) -> bool:
    location, _, pointer = url.partition("#")
    root = check.load(location) if location else check.root
    found: Any = root
    for part in filter(None, pointer.split("/")):
        found = found[part]
    within = SchemaCheck(root, check.load) if location else check
    return within.decide(found, value)


def _check_type(_: SchemaCheck, names: Any, value: object, __: Any) -> bool:
    return any(_TYPES[name](value) for name in ([names] if isinstance(names, str) else names))


def _check_enum(_: SchemaCheck, values: list[Any], value: object, __: Any) -> bool:
    return any(_is_equal(each, value) for each in values)


def _check_const(_: SchemaCheck, expected: Any, value: object, __: Any) -> bool:
    return _is_equal(expected, value)


def _check_properties(
    check: SchemaCheck, schemas: Mapping[str, Any], value: object, _: Any
) -> bool:
    return not isinstance(value, dict) or all(
        check.decide(schemas[key], each) for key, each in value.items() if key in schemas
    )


def _check_others(check: SchemaCheck, rule: Any, value: object, schema: Mapping[str, Any]) -> bool:
    declared = schema.get("properties", {})
    return not isinstance(value, dict) or all(
        check.decide(rule, each) for key, each in value.items() if key not in declared
    )


def _check_names(check: SchemaCheck, rule: Any, value: object, _: Any) -> bool:
    return not isinstance(value, dict) or all(check.decide(rule, key) for key in value)


def _check_required(_: SchemaCheck, names: list[str], value: object, __: Any) -> bool:
    return not isinstance(value, dict) or value.keys() >= set(names)


def _check_items(check: SchemaCheck, rule: Any, value: object, _: Any) -> bool:
    return not isinstance(value, list) or all(check.decide(rule, each) for each in value)


def _check_unique(_: SchemaCheck, rule: bool, value: object, __: Any) -> bool:
    if not rule or not isinstance(value, list):
        return True
    if not all(isinstance(each, str) for each in value):
        raise UnknownKeywordError("uniqueItems")
    return len(set(value)) == len(value)


def _check_one_of(check: SchemaCheck, schemas: list[Any], value: object, _: Any) -> bool:
    return sum(check.decide(schema, value) for schema in schemas) == 1


def _check_any_of(check: SchemaCheck, schemas: list[Any], value: object, _: Any) -> bool:
    return any(check.decide(schema, value) for schema in schemas)


def _check_pattern(_: SchemaCheck, pattern: str, value: object, __: Any) -> bool:
    return not isinstance(value, str) or compile_pattern(pattern).search(value) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_equal(expected: object, value: object) -> bool:
    if isinstance(expected, dict | list):
        raise UnknownKeywordError("enum")
    return isinstance(expected, bool) is isinstance(value, bool) and expected == value


@functools.cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern of JSON Schema as one of Python, where ``$`` is the end alone."""
    # In a character class, $ is literal.
    shielded = re.sub(r"\[[^]]*\]", lambda match: match[0].replace("$", r"\$"), pattern)
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", shielded))


_TYPES: dict[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def _bound(kind: type, measure: Callable[[Any], Any], holds: Callable[[Any, Any], bool]) -> Any:
    """Return the check of a bound for values of a type."""
    return lambda _, rule, value, __: not isinstance(value, kind) or holds(measure(value), rule)


def _bound_number(holds: Callable[[Any, Any], bool]) -> Any:
    return lambda _, rule, value, __: not _is_number(value) or holds(value, rule)


_CHECKS: dict[str, Any] = {
    "$ref": _follow,
    "type": _check_type,
    "enum": _check_enum,
    "const": _check_const,
    "properties": _check_properties,
    "additionalProperties": _check_others,
    "propertyNames": _check_names,
    "required": _check_required,
    "items": _check_items,
    "uniqueItems": _check_unique,
    "anyOf": _check_any_of,
    "oneOf": _check_one_of,
    "pattern": _check_pattern,
    "minProperties": _bound(dict, len, int.__ge__),
    "minItems": _bound(list, len, int.__ge__),
    "maxItems": _bound(list, len, int.__le__),
    "minLength": _bound(str, len, int.__ge__),
    "maxLength": _bound(str, len, int.__le__),
    "minimum": _bound_number(lambda value, bound: bool(value >= bound)),
    "maximum": _bound_number(lambda value, bound: bool(value <= bound)),
    "exclusiveMinimum": _bound_number(lambda value, bound: bool(value > bound)),
    "exclusiveMaximum": _bound_number(lambda value, bound: bool(value < bound)),
}

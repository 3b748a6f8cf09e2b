"""JSON Schemas whose objects end: other properties only where a schema asks for them.

JSON Schema allows any further properties by default, and a small model goes on with them for ever.
llama.cpp's own grammars leave them out, too (ggml-org/llama.cpp, grammars/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords that combine the properties of several schemas, or refer to others of an object
_COMBINING = frozenset(
    {
        "if",
        "then",
        "else",
        "not",
        "dependentSchemas",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_OPEN = ("additionalProperties", "patternProperties", "propertyNames", "minProperties")
# Keywords whose values are data, and those whose values are schemas by names
_DATA = ("const", "enum", "default", "examples")
_BY_NAME = ("properties", "$defs", "definitions")


def drop_nulls(schema: Any) -> Any:
    """Return a schema without keywords that are null, which serializers write for absent ones."""
    if isinstance(schema, list):
        return [drop_nulls(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kinds = schema.get("type") or "null"
    # As a value null has a meaning, where the type allows it
    is_null = "null" in ([kinds] if isinstance(kinds, str) else kinds)
    return {
        key: value if key in _DATA else _convert_value(key, value, drop_nulls)
        for key, value in schema.items()
        if value is not None or (key == "const" and is_null)
    }


def close_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose objects have the stated properties only, unless it says otherwise.

    A schema that combines objects is unchanged: what one allows another may require.
    """
    if any(map(_is_combined, _iter_schemas(schema))):
        return schema
    closed: dict[str, Any] = _close(schema)
    return closed


def _iter_schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those in it."""
    if isinstance(schema, list):
        for item in schema:
            yield from _iter_schemas(item)
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            yield from _iter_schemas([*value.values()])
        elif key not in _DATA:
            yield from _iter_schemas(value)


def _is_combined(schema: Mapping[str, Any]) -> bool:
    alternatives = schema.keys() & {"allOf", "anyOf", "oneOf", "$ref"}
    several = isinstance(parts := schema.get("allOf"), list) and len(parts) > 1
    is_joined = bool(alternatives) and ("properties" in schema or len(alternatives) > 1)
    return several or is_joined or bool(schema.keys() & _COMBINING)


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {
        key: value if key in _DATA else _convert_value(key, value, _close)
        for key, value in schema.items()
    }
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list):
        return closed
    if not schema.keys() & {*_OPEN} and all(name in names for name in required):
        closed["additionalProperties"] = False
    return closed


def _convert_value(key: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: convert(nested) for name, nested in value.items()}
    return convert(value)

"""The JSON Schemas of the types of operations: pydantic's, in which null counts as absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from clowder_aimage.api.request_body import OpenBody, RequestBody
from clowder_aimage.http.operation import Operation

SCHEMAS = "#/components/schemas/"


def schemas_of(
    operations: Sequence[Operation], *others: object
) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the schemas of all types by their identity, and the components that they name."""
    kinds: dict[int, Any] = {id(kind): kind for kind in others}
    texts: list[Any] = []
    for one in operations:
        texts += [one.places, one.query, one.headers, one.form]
        for kind in (one.body, *(answer.body for answer in one.answers)):
            if kind is not None:
                kinds[id(kind)] = kind
    adapters = [(key, "validation", TypeAdapter(kind)) for key, kind in kinds.items()]
    found, rest = TypeAdapter.json_schemas(
        adapters,  # type: ignore[arg-type]
        ref_template=SCHEMAS + "{model}",
        schema_generator=_Schema,
    )
    schemas: dict[int, Any] = {key: schema for (key, _), schema in found.items()}
    for kind in texts:
        if kind is not None:
            schemas[id(kind)] = TypeAdapter(kind).json_schema(schema_generator=_TextSchema)
    return schemas, dict(sorted(rest["$defs"].items()))


class _Schema(GenerateJsonSchema):
    """Pydantic's schemas without titles; a null is a type of a value, or of an absent field."""

    has_null = True

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return _or_null(inner) if self.has_null else inner

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        value = schema.get("default")
        if value is None or isinstance(value, BaseModel):  # an object without fields
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        found = super().typed_dict_schema(schema)
        found.pop("title", None)
        return found

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found, kind = super().model_schema(schema), schema["cls"]
        found.pop("title", None)
        found["description"] = found.get("description", "").replace("``", "`")
        if not issubclass(kind, RequestBody) or "properties" not in found or not self.has_null:
            return found
        fields, required = found["properties"], found.get("required", ())
        for name in fields.keys() - {*required}:
            fields[name] = _or_null(fields[name])
        no_effect = {"description": "Accepted, and has no effect."}
        rules = [rule.schema(fields.keys(), kind.unset) for rule in kind.rules()]
        if stated := [rule for rule in rules if rule is not None]:
            found["allOf"] = [*found.get("allOf", ()), *stated]
        fields |= dict.fromkeys(sorted(kind.NO_EFFECT), no_effect)
        if issubclass(kind, OpenBody):
            lenient = {"properties": {"strict": {"enum": [False, 0, None]}}}
            strict = {"propertyNames": {"enum": sorted(fields)}}
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": [lenient, strict]}]
        return found


class _TextSchema(_Schema):
    """The schemas of parameters and of forms, which are texts and never null."""

    has_null = False


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return a schema that null satisfies too."""
    found = dict(schema)
    if "enum" in found:
        found["enum"] = list(dict.fromkeys((*found["enum"], None)))
    kind = found.get("type")
    if isinstance(kind, str) and kind != "null":
        found["type"] = [kind, "null"]
    elif "const" in found and kind is None:
        found = {"anyOf": [found, {"type": "null"}]}
    elif "anyOf" in found and {"type": "null"} not in found["anyOf"]:
        found["anyOf"] = [*found["anyOf"], {"type": "null"}]
    elif "$ref" in found:
        found["anyOf"] = [{"$ref": found.pop("$ref")}, {"type": "null"}]
    return found

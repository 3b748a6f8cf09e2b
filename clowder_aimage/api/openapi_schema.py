"""The JSON Schemas of the types of operations: pydantic's; null counts as absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from clowder_aimage.api.request_body import OpenBody, RequestBody, is_optional_choice
from clowder_aimage.http.operation import Operation

SCHEMAS = "#/components/schemas/"


def build_schemas(
    operations: Sequence[Operation], *types: object
) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the schemas of all types by their identity, and the components that they name."""
    kinds: dict[int, Any] = {id(kind): kind for kind in types}
    texts: list[Any] = []
    forms: list[Any] = [operation.form for operation in operations if operation.form is not None]
    for operation in operations:
        texts += [operation.path_fields, operation.query, operation.headers]
        for kind in (operation.body, *(answer.body for answer in operation.answers)):
            if kind is not None:
                kinds[id(kind)] = kind
    adapters = [(key, "validation", TypeAdapter(kind)) for key, kind in kinds.items()]
    generated, definitions = TypeAdapter.json_schemas(
        adapters,  # type: ignore[arg-type]
        ref_template=SCHEMAS + "{model}",
        schema_generator=_Schema,
    )
    schemas: dict[int, Any] = {key: schema for (key, _), schema in generated.items()}
    for kind in texts:
        if kind is not None:
            schemas[id(kind)] = TypeAdapter(kind).json_schema(schema_generator=_TextSchema)
    for kind in forms:
        schemas[id(kind)] = TypeAdapter(kind).json_schema(schema_generator=_FormSchema)
    return schemas, dict(sorted(definitions["$defs"].items()))


class _Schema(GenerateJsonSchema):
    """Pydantic's schemas without titles; a null is a type of a value, or of an absent field."""

    has_null = True

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return _allow_null(inner) if self.has_null else inner

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        value = schema.get("default")
        # An object without fields
        if value is None or isinstance(value, BaseModel):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        json_schema = super().typed_dict_schema(schema)
        json_schema.pop("title", None)
        return json_schema

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema, kind = super().model_schema(schema), schema["cls"]
        json_schema.pop("title", None)
        json_schema["description"] = json_schema.get("description", "").replace("``", "`")
        if (
            not issubclass(kind, RequestBody)
            or "properties" not in json_schema
            or not self.has_null
        ):
            return json_schema
        fields, required = json_schema["properties"], json_schema.get("required", ())
        for name in fields.keys() - {*required}:
            fields[name] = _allow_null(fields[name])
            if "enum" in fields[name] and is_optional_choice(kind.model_fields.get(name)):
                fields[name]["enum"].append("")
        no_effect = {"description": "Accepted, and has no effect."}
        rules = [rule.build_schema(fields.keys(), kind.list_unset) for rule in kind.list_rules()]
        if stated := [rule for rule in rules if rule is not None]:
            json_schema["allOf"] = [*json_schema.get("allOf", ()), *stated]
        fields |= dict.fromkeys(sorted(kind.NO_EFFECT), no_effect)
        if issubclass(kind, OpenBody):
            lenient = {"properties": {"strict": {"enum": [False, 0, None]}}}
            strict = {"propertyNames": {"enum": sorted(fields)}}
            json_schema["allOf"] = [*json_schema.get("allOf", ()), {"anyOf": [lenient, strict]}]
        return json_schema


class _TextSchema(_Schema):
    """The schemas of parameters: texts, and never null."""

    has_null = False


class _FormSchema(_TextSchema):
    """The schemas of forms, in which the text null counts as absent."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        fields, required = json_schema["properties"], json_schema.get("required", ())
        for name in fields.keys() - {*required}:
            fields[name] = _allow_null(fields[name])
        return json_schema


def _allow_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return a schema that null satisfies too."""
    nullable = dict(schema)
    if "enum" in nullable:
        nullable["enum"] = list(dict.fromkeys((*nullable["enum"], None)))
    kind = nullable.get("type")
    if isinstance(kind, str) and kind != "null":
        nullable["type"] = [kind, "null"]
    elif "const" in nullable and kind is None:
        nullable = {"anyOf": [nullable, {"type": "null"}]}
    elif "anyOf" in nullable and {"type": "null"} not in nullable["anyOf"]:
        nullable["anyOf"] = [*nullable["anyOf"], {"type": "null"}]
    elif "$ref" in nullable:
        nullable["anyOf"] = [{"$ref": nullable.pop("$ref")}, {"type": "null"}]
    return nullable

"""The parameters of pictures as a module of the page, as ``generation`` defines them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from typing import Any, Literal, get_args, get_origin

from clowder_aimage.generation.parameter import Parameter, ValueType, list_parameters
from clowder_aimage.generation.request import (
    CONTROL_STRENGTH,
    MODEL_DEFAULTS,
    STRENGTH,
    UPSCALE_STRENGTH,
    ParameterLocation,
)

NAME = "parameters.js"
_KINDS = {bool: "flag", int: "whole", float: "number", str: "text"}
_BOUNDS = {
    "ge": "least",
    "gt": "above",
    "le": "most",
    "multiple_of": "step",
    "min_length": "least",
    "max_length": "most",
}
# The largest integer that JavaScript's numbers represent exactly
_MAX_WHOLE = (1 << 53) - 1
_STRENGTHS = {"image": STRENGTH, "upscale": UPSCALE_STRENGTH, "control": CONTROL_STRENGTH}


def render_module(table: Mapping[str, ParameterLocation]) -> str:
    """Return the module: the parameters by their names, and the strengths that are defaults.

    The kinds are whole, number, digits (a whole number beyond those of JavaScript), text, digest,
    flag, one, list and object; ``of`` has the choices, the item of a list, or the fields.
    """
    entries = [
        f"  {name}: {json.dumps({'group': location.group, **_describe(location.parameter)})},\n"
        for name, location in table.items()
    ]
    strengths = f"export const STRENGTHS = {json.dumps(_STRENGTHS)};\n"
    return f"export const PARAMETERS = {{\n{''.join(entries)}}};\n{strengths}"


def _describe(parameter: Parameter) -> dict[str, Any]:
    words, name, default = parameter.words, parameter.name, parameter.default
    optional = {
        "default": None if default is MISSING else default,
        "usual": words.usual,
        "ofModel": name in MODEL_DEFAULTS or None,
    }
    stated = {key: value for key, value in optional.items() if value is not None}
    about = {"field": parameter.field, "help": words.help}
    return _describe_type(parameter.type, words.unit) | about | stated


def _describe_type(accepted: ValueType, unit: str = "") -> dict[str, Any]:
    """Return the kind of a value with its bounds."""
    kind = accepted.kind
    bounds = {_BOUNDS[name]: bound for name, bound in accepted.bounds.items()}
    if accepted.is_optional:
        bounds["isOptional"] = True
    if get_origin(kind) is Literal:
        return {"kind": "one", "of": get_args(kind), **bounds}
    if get_origin(kind) is tuple:
        item, *other_types = get_args(kind)
        count = (
            {}
            if other_types == [...]
            else {"least": 1 + len(other_types), "most": 1 + len(other_types)}
        )
        return {"kind": "list", "of": _describe_type(ValueType.of(item), unit), **bounds, **count}
    if isinstance(kind, type) and is_dataclass(kind):
        fields = {field.attribute: _describe(field) for field in list_parameters(kind)}
        return {"kind": "object", "of": fields, **bounds}
    if kind is int and bounds.get("most", 0) > _MAX_WHOLE:
        return {"kind": "digits", **bounds, "most": str(bounds["most"])}
    return {"kind": "digest" if unit == "digest" else _KINDS[kind], **bounds}

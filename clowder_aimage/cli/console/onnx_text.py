"""The inputs and outputs of the ONNX models of an AImage, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clowder_aimage.cli.console.output import format_number
from clowder_aimage.content.platform import format_cell
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.formats.onnx_signature import OnnxSignature, OnnxValue, read_signature
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import mediatype

# Models that are read, and values of each that are printed.
_MAX_MODELS, _SHOWN = 20, 8


def read_signatures(layout: ImageLayout, aimage: AImage) -> dict[str, OnnxSignature]:
    """Return the signatures of the ONNX models in the store, by their names."""
    signatures = {}
    for layer in aimage.layers:
        is_onnx = layer.descriptor.media_type == mediatype.AIMAGE_ONNX
        if not is_onnx or not layer.name.lower().endswith(".onnx"):
            continue
        try:
            with layout.find_path(layer.descriptor).open("rb") as file:
                signatures[layer.name] = read_signature(file, layer.descriptor.size)
        except (FormatError, NotFoundError, OSError):
            # Its readers report damage, and a missing blob is listed.
            continue
        if len(signatures) == _MAX_MODELS:
            break
    return signatures


def encode_signature(name: str, signature: OnnxSignature) -> dict[str, Any]:
    """Return a signature for programs."""
    return {
        "name": name,
        "irVersion": signature.model.ir_version,
        "opset": signature.model.opset,
        "parameters": signature.model.parameters,
        "inputs": [_encode_value(value) for value in signature.inputs],
        "outputs": [_encode_value(value) for value in signature.outputs],
    }


def _encode_value(value: OnnxValue) -> dict[str, Any]:
    shape = None if value.shape is None else [*value.shape]
    return {"name": value.name, "type": value.type, "shape": shape}


def format_signature(name: str, signature: OnnxSignature) -> list[str]:
    """Return a signature for people: a line for the model, its inputs and its outputs."""
    model = signature.model
    count = format_number(model.parameters)
    return [
        f"{name}: ir {model.ir_version}, opset {model.opset}, {count} parameters",
        f"  inputs   {_join_values(signature.inputs)}",
        f"  outputs  {_join_values(signature.outputs)}",
    ]


def _join_values(values: Sequence[OnnxValue]) -> str:
    shown = ", ".join(format_cell(str(value)) for value in values[:_SHOWN])
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return f"{shown}{more}" or "none"

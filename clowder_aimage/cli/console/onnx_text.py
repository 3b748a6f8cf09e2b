"""The inputs and outputs of the ONNX models of an AImage, for people."""

from __future__ import annotations

from collections.abc import Sequence

from clowder_aimage.cli.console.output import format_number
from clowder_aimage.content.platform import format_cell
from clowder_aimage.formats.onnx_signature import OnnxSignature, OnnxValue

# Values of a model that are printed.
_SHOWN = 8


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

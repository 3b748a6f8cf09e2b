"""The inputs, outputs and size of an ONNX model, for people.

Format: onnx/onnx, onnx/onnx.proto3, the source of the field numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.onnx_graph import MAX_RANK
from clowder_aimage.formats.protobuf import BYTES, WireField, WireReader

# TensorProto.DataType
_TYPES = dict(
    enumerate(
        "undefined float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 "
        "uint64 complex64 complex128 bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 "
        "float8e5m2fnuz uint4 int4 float4e2m1 float8e8m0 uint2 int2".split()
    )
)
# Fields of GraphProto.
_INITIALIZER, _SPARSE, _INPUT, _OUTPUT = 5, 15, 11, 12
# Inputs and outputs of a model that are listed.
_MAX_VALUES = 256


@dataclass(frozen=True, slots=True)
class OnnxValue:
    """An input or an output: a dimension is a number, the name of a variable one, or ``?``."""

    name: str
    type: str
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        dimensions = "" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{self.name} {self.type}{dimensions}"


@dataclass(slots=True)
class OnnxSignature:
    """The versions of a model, the number of values of its weights, its inputs and outputs."""

    ir_version: int = 0
    opset: int = 0
    parameters: int = 0
    inputs: list[OnnxValue] = field(default_factory=list)
    outputs: list[OnnxValue] = field(default_factory=list)


def read_signature(file: BinaryIO, size: int) -> OnnxSignature:
    """Read an open ONNX file of ``size`` bytes. Raises FormatError: It is not valid."""
    wire, signature = WireReader(file, size), OnnxSignature()
    for model_field in wire.iter_fields(0, size):
        if model_field.number == 1:
            signature.ir_version = model_field.decode_int64()
        elif model_field.number == 8:
            signature.opset = max(signature.opset, _read_opset(wire, model_field))
        elif model_field.number == 7:
            _read_graph(wire, model_field, signature)
    return signature


def _read_opset(wire: WireReader, message: WireField) -> int:
    domain, version = "", 0
    for inner in _iter_inner(wire, message):
        if inner.number == 1:
            domain = wire.read_text(inner)
        elif inner.number == 2:
            version = inner.decode_int64()
    return version if domain in ("", "ai.onnx") else 0


def _read_graph(wire: WireReader, message: WireField, signature: OnnxSignature) -> None:
    weights: set[str] = set()
    inputs: list[OnnxValue] = []
    for inner in _iter_inner(wire, message):
        if inner.number == _INITIALIZER:
            name, count = _read_weight(wire, inner)
            weights.add(name)
            signature.parameters += count
        elif inner.number == _SPARSE:
            values = (part for part in _iter_inner(wire, inner) if part.number == 1)
            signature.parameters += sum(_read_weight(wire, part)[1] for part in values)
        elif inner.number == _INPUT and len(inputs) < _MAX_VALUES:
            inputs.append(_read_value(wire, inner))
        elif inner.number == _OUTPUT and len(signature.outputs) < _MAX_VALUES:
            signature.outputs.append(_read_value(wire, inner))
    # Before version 4 of the IR, weights were inputs too.
    signature.inputs += [value for value in inputs if value.name not in weights]


def _read_weight(wire: WireReader, message: WireField) -> tuple[str, int]:
    dims: list[int] = []
    name = ""
    for inner in _iter_inner(wire, message):
        if inner.number == 1:
            dims += wire.read_int64s(inner, MAX_RANK)
        elif inner.number == 8:
            name = wire.read_text(inner)
    if len(dims) > MAX_RANK or min(dims, default=0) < 0:
        raise FormatError(f"at byte {message.offset}, invalid tensor dimensions")
    return name, math.prod(dims)


def _read_value(wire: WireReader, message: WireField) -> OnnxValue:
    """Read a ValueInfoProto. Only tensors have a type and a shape."""
    name, value = "", OnnxValue("", "other", None)
    for inner in _iter_inner(wire, message):
        if inner.number == 1:
            name = wire.read_text(inner)
        elif inner.number == 2:
            for kind in _iter_inner(wire, inner):
                if kind.number == 1:
                    value = _read_tensor_type(wire, kind)
    return OnnxValue(name, value.type, value.shape)


def _read_tensor_type(wire: WireReader, message: WireField) -> OnnxValue:
    kind, shape = "undefined", None
    for inner in _iter_inner(wire, message):
        if inner.number == 1:
            kind = _TYPES.get(inner.decode_int64(), "unknown")
        elif inner.number == 2:
            dims = [part for part in _iter_inner(wire, inner) if part.number == 1]
            shape = tuple(_read_dimension(wire, part) for part in dims[:MAX_RANK])
    return OnnxValue("", kind, shape)


def _read_dimension(wire: WireReader, message: WireField) -> int | str:
    dimension: int | str = "?"
    for inner in _iter_inner(wire, message):
        if inner.number == 1:
            dimension = inner.decode_int64()
        elif inner.number == 2:
            dimension = wire.read_text(inner) or "?"
    return dimension


def _iter_inner(wire: WireReader, message: WireField) -> Iterator[WireField]:
    message.expect(BYTES)
    return wire.iter_fields(message.start, message.end)

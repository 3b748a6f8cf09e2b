"""The inputs and outputs of an ONNX model.

Format: onnx/onnx, onnx/onnx.proto3, the source of the field numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from clowder_aimage.formats.onnx_graph import MAX_RANK, OnnxModel, read_model
from clowder_aimage.formats.protobuf import BYTES, WireField, WireReader

# TensorProto.DataType
_TYPES = dict(
    enumerate(
        "undefined float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 "
        "uint64 complex64 complex128 bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 "
        "float8e5m2fnuz uint4 int4 float4e2m1 float8e8m0 uint2 int2".split()
    )
)
# The field of ModelProto, and those of GraphProto.
_GRAPH, _INITIALIZER, _INPUT, _OUTPUT = 7, 5, 11, 12
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


@dataclass(frozen=True, slots=True)
class OnnxSignature:
    """A model with its inputs and outputs."""

    model: OnnxModel
    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]


def read_signature(file: BinaryIO, size: int) -> OnnxSignature:
    """Read an open ONNX file of ``size`` bytes. Raises FormatError: It is not valid."""
    wire, model = WireReader(file, size), read_model(file, size)
    weights: set[str] = set()
    values: dict[int, list[OnnxValue]] = {_INPUT: [], _OUTPUT: []}
    for graph in (part for part in wire.iter_fields(0, size) if part.number == _GRAPH):
        for inner in _iter_inner(wire, graph):
            if inner.number == _INITIALIZER:
                weights.update(_read_name(wire, inner))
            elif inner.number in values and len(values[inner.number]) < _MAX_VALUES:
                values[inner.number].append(_read_value(wire, inner))
    # Before version 4 of the IR, weights were inputs too.
    inputs = (value for value in values[_INPUT] if value.name not in weights)
    return OnnxSignature(model, tuple(inputs), tuple(values[_OUTPUT]))


def _read_name(wire: WireReader, tensor: WireField) -> Iterator[str]:
    return (wire.read_text(inner) for inner in _iter_inner(wire, tensor) if inner.number == 8)


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

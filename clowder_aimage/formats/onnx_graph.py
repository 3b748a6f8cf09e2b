"""A parser of ONNX files: their versions, and the extents of their external files.

Formats: onnx/onnx, onnx/onnx.proto3 (the source of the field numbers below) and
docs/ExternalData.md. No tensor is loaded. Every message that can hold a tensor is visited:
initializers, attributes, subgraphs in attributes, functions, training, and both halves of sparse
tensors. Duplicates of singular fields are rejected, since a reader that merges them would see
a different model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.model_tree import OTHER
from clowder_aimage.formats.protobuf import BYTES, VARINT, WireField, WireReader
from clowder_aimage.tensor.header import MAX_ELEMENTS

# Nested messages, as in the reference implementation of protobuf.
MAX_DEPTH = 100
MAX_RANK = 64
MAX_LOCATIONS = 8000

# Messages that may contain tensors: the fields that lead to them.
_SUBMESSAGES: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": dict.fromkeys((5, 10), "TensorProto")
    | dict.fromkeys((6, 11), "GraphProto")
    | dict.fromkeys((22, 23), "SparseTensorProto"),
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
}
# Fields that protobuf merges if they are repeated.
_SINGULAR: dict[str, set[int]] = {
    "ModelProto": {1, 7},
    "TrainingInfoProto": {1, 2},
    "AttributeProto": {5, 6, 22},
    "SparseTensorProto": {1, 2},
}
# The top-level fields of ModelProto and their wire types.
_MODEL_FIELDS = dict.fromkeys((1, 5), VARINT) | dict.fromkeys(
    (2, 3, 4, 6, 7, 8, 14, 20, 25, 26), BYTES
)
# TensorProto.DataType: bits of an element. STRING (8) is never external.
_BITS = {
    **dict.fromkeys((25, 26), 2),
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    15: 128,
}


@dataclass(frozen=True, slots=True)
class ExternalExtent:
    """The first ``end`` bytes of an external file, required by ``tensor``."""

    tensor: str
    end: int


@dataclass(slots=True)
class OnnxModel:
    """Versions of a model, values of all its tensors, and the extents of external files."""

    ir_version: int = 0
    opset: int = 0
    parameters: int = 0
    external: dict[str, ExternalExtent] = field(default_factory=dict)


def is_model(file: BinaryIO, size: int) -> bool:
    """Return True if the top-level fields of a file are those of an ONNX model."""
    numbers = set()
    try:
        for wire_field in WireReader(file, size).iter_fields(0, size):
            if _MODEL_FIELDS.get(wire_field.number) != wire_field.wire:
                return False
            numbers.add(wire_field.number)
    except FormatError:
        return False
    return {1, 7} <= numbers


def read_model(file: BinaryIO, size: int) -> OnnxModel:
    """Read an open ONNX file of ``size`` bytes.

    Raises:
        FormatError: It is not an ONNX model, is truncated, or describes an impossible tensor.
    """
    model = OnnxModel()
    numbers = _walk(WireReader(file, size), "ModelProto", 0, size, model, 1)
    if not {1, 7} <= numbers or model.ir_version < 1:
        raise FormatError("not an ONNX model: it has no IR version or no graph", hint=OTHER)
    return model


def _walk(
    wire: WireReader, kind: str, start: int, end: int, model: OnnxModel, depth: int
) -> set[int]:
    """Read all tensors of a message and return its field numbers."""
    numbers: set[int] = set()
    for wire_field in wire.iter_fields(start, end):
        if wire_field.number in numbers and wire_field.number in _SINGULAR.get(kind, ()):
            raise FormatError(f"at byte {wire_field.offset}, duplicate field in {kind}")
        numbers.add(wire_field.number)
        inner = _SUBMESSAGES[kind].get(wire_field.number)
        if inner is None:
            if kind == "ModelProto":
                _read_versions(wire, wire_field, model)
            continue
        wire_field.expect(BYTES)
        if depth > MAX_DEPTH:
            raise FormatError(f"at byte {wire_field.offset}, nested more than {MAX_DEPTH} deep")
        if inner == "TensorProto":
            _read_tensor(wire, wire_field, model)
        else:
            _walk(wire, inner, wire_field.start, wire_field.end, model, depth + 1)
    return numbers


def _read_versions(wire: WireReader, wire_field: WireField, model: OnnxModel) -> None:
    """Record the version of the IR, or of the ONNX operator set (OperatorSetIdProto)."""
    if wire_field.number == 1:
        model.ir_version = wire_field.decode_int64()
    elif wire_field.number == 8:
        wire_field.expect(BYTES)
        domain, version = "", 0
        for inner_field in wire.iter_fields(wire_field.start, wire_field.end):
            if inner_field.number == 1:
                domain = wire.read_text(inner_field)
            elif inner_field.number == 2:
                version = inner_field.decode_int64()
        if domain in ("", "ai.onnx"):
            model.opset = max(model.opset, version)


def _read_tensor(wire: WireReader, message: WireField, model: OnnxModel) -> None:
    dims: list[int] = []
    kind, name, is_external = 0, "", False
    external: dict[str, str] = {}
    for wire_field in wire.iter_fields(message.start, message.end):
        if wire_field.number == 1:
            dims += wire.read_int64s(wire_field, MAX_RANK)
            if len(dims) > MAX_RANK or min(dims, default=0) < 0:
                raise FormatError(f"at byte {wire_field.offset}, invalid tensor dimensions")
        elif wire_field.number == 2:
            kind = wire_field.decode_int64()
        elif wire_field.number == 8:
            name = wire.read_text(wire_field)
        elif wire_field.number == 13:
            _read_entry(wire, wire_field, external)
        elif wire_field.number == 14:
            is_external = wire_field.decode_int64() == 1
    model.parameters += math.prod(dims)
    # Entries are checked without data_location = EXTERNAL too: a lenient reader could follow them.
    if is_external or external:
        name = name or f"at byte {message.offset}"
        elements = math.prod(dims)
        if elements > MAX_ELEMENTS:
            raise FormatError(f"tensor {name[:200]!r} has too many elements")
        _add_extent(model, name, external, (elements * _BITS.get(kind, 0) + 7) // 8)


def _read_entry(wire: WireReader, message: WireField, external: dict[str, str]) -> None:
    """Add an entry of external_data (StringStringEntryProto)."""
    message.expect(BYTES)
    pair = {1: "", 2: ""}
    for wire_field in wire.iter_fields(message.start, message.end):
        if wire_field.number in pair:
            pair[wire_field.number] = wire.read_text(wire_field)
    if pair[1] in external:
        raise FormatError(f"at byte {message.offset}, duplicate external data key {pair[1][:60]!r}")
    external[pair[1]] = pair[2]


def _add_extent(model: OnnxModel, name: str, external: Mapping[str, str], size: int) -> None:
    location = external.get("location")
    if not location:
        raise FormatError(f"tensor {name[:200]!r} has external data without a location")
    offset = _parse_number(name, external, "offset", 0)
    length = _parse_number(name, external, "length", size)
    if length < size:
        raise FormatError(f"tensor {name[:200]!r} takes {size} bytes, but its data has {length}")
    previous = model.external.get(location)
    if previous is None or previous.end < offset + length:
        model.external[location] = ExternalExtent(name, offset + length)
    if len(model.external) > MAX_LOCATIONS:
        raise FormatError(f"external data is in more than {MAX_LOCATIONS} files")


def _parse_number(name: str, external: Mapping[str, str], key: str, default: int) -> int:
    word = external.get(key, str(default))
    if not word.isascii() or not word.isdecimal() or len(word) > 30:
        raise FormatError(f"the {key} of tensor {name[:200]!r} is not a number: {word[:60]!r}")
    return int(word)

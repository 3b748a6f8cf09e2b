"""A parser of ONNX files: their versions, and the byte ranges of external files they need.

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

MAX_DEPTH = 100  # nested messages, as in the reference implementation of protobuf
MAX_RANK = 64
MAX_LOCATIONS = 8000

# messages that may contain tensors: the fields that lead to them
_INNER: dict[str, dict[int, str]] = {
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
_ONCE: dict[str, set[int]] = {
    "ModelProto": {1, 7},
    "TrainingInfoProto": {1, 2},
    "AttributeProto": {5, 6, 22},
    "SparseTensorProto": {1, 2},
}
# the top-level fields of ModelProto and their wire types
_MODEL_FIELDS = dict.fromkeys((1, 5), VARINT) | dict.fromkeys(
    (2, 3, 4, 6, 7, 8, 14, 20, 25, 26), BYTES
)
# TensorProto.DataType: bits of an element; STRING (8) is never external
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
class Need:
    """The first ``end`` bytes of an external file, required by ``tensor``."""

    tensor: str
    end: int


@dataclass(slots=True)
class OnnxModel:
    """Versions of a model, and the need for each location of external data."""

    ir_version: int = 0
    opset: int = 0
    external: dict[str, Need] = field(default_factory=dict)


def is_model(file: BinaryIO, size: int) -> bool:
    """Return whether a file could be an ONNX model, judged by its top-level fields."""
    found = set()
    try:
        for one in WireReader(file, size).fields(0, size):
            if _MODEL_FIELDS.get(one.number) != one.wire:
                return False
            found.add(one.number)
    except FormatError:
        return False
    return {1, 7} <= found


def read_model(file: BinaryIO, size: int) -> OnnxModel:
    """Read an open ONNX file of ``size`` bytes.

    Raises:
        FormatError: It is not an ONNX model, is truncated, or describes an impossible tensor.
    """
    model = OnnxModel()
    found = _walk(WireReader(file, size), "ModelProto", 0, size, model, 1)
    if not {1, 7} <= found or model.ir_version < 1:
        raise FormatError("not an ONNX model: it has no IR version or no graph", hint=OTHER)
    return model


def _walk(
    wire: WireReader, kind: str, start: int, end: int, model: OnnxModel, depth: int
) -> set[int]:
    """Read all tensors of a message and return its field numbers."""
    seen: set[int] = set()
    for one in wire.fields(start, end):
        if one.number in seen and one.number in _ONCE.get(kind, ()):
            raise FormatError(f"at byte {one.place}, duplicate field in {kind}")
        seen.add(one.number)
        inner = _INNER[kind].get(one.number)
        if inner is None:
            if kind == "ModelProto":
                _read_versions(wire, one, model)
            continue
        one.expect(BYTES)
        if depth > MAX_DEPTH:
            raise FormatError(f"at byte {one.place}, nested more than {MAX_DEPTH} deep")
        if inner == "TensorProto":
            _read_tensor(wire, one, model)
        else:
            _walk(wire, inner, one.start, one.end, model, depth + 1)
    return seen


def _read_versions(wire: WireReader, one: WireField, model: OnnxModel) -> None:
    """Record the version of the IR, or of the ONNX operator set (OperatorSetIdProto)."""
    if one.number == 1:
        model.ir_version = one.int64()
    elif one.number == 8:
        one.expect(BYTES)
        domain, version = "", 0
        for part in wire.fields(one.start, one.end):
            if part.number == 1:
                domain = wire.text(part)
            elif part.number == 2:
                version = part.int64()
        if domain in ("", "ai.onnx"):
            model.opset = max(model.opset, version)


def _read_tensor(wire: WireReader, message: WireField, model: OnnxModel) -> None:
    dims: list[int] = []
    kind, name, is_external = 0, "", False
    stated: dict[str, str] = {}
    for one in wire.fields(message.start, message.end):
        if one.number == 1:
            dims += wire.int64s(one, MAX_RANK)
            if len(dims) > MAX_RANK or min(dims, default=0) < 0:
                raise FormatError(f"at byte {one.place}, invalid tensor dimensions")
        elif one.number == 2:
            kind = one.int64()
        elif one.number == 8:
            name = wire.text(one)
        elif one.number == 13:
            _read_entry(wire, one, stated)
        elif one.number == 14:
            is_external = one.int64() == 1
    if is_external or stated:
        name = name or f"at byte {message.place}"
        elements = math.prod(dims)
        if elements > MAX_ELEMENTS:
            raise FormatError(f"tensor {name[:200]!r} has too many elements")
        _add_need(model, name, stated, (elements * _BITS.get(kind, 0) + 7) // 8)


def _read_entry(wire: WireReader, message: WireField, stated: dict[str, str]) -> None:
    """Add an entry of external_data (StringStringEntryProto)."""
    message.expect(BYTES)
    pair = {1: "", 2: ""}
    for one in wire.fields(message.start, message.end):
        if one.number in pair:
            pair[one.number] = wire.text(one)
    if pair[1] in stated:
        raise FormatError(f"at byte {message.place}, duplicate external data key {pair[1][:60]!r}")
    stated[pair[1]] = pair[2]


def _add_need(model: OnnxModel, name: str, stated: Mapping[str, str], size: int) -> None:
    location = stated.get("location")
    if not location:
        raise FormatError(f"tensor {name[:200]!r} has external data without a location")
    offset = _number(name, stated, "offset", 0)
    length = _number(name, stated, "length", size)
    if length < size:
        raise FormatError(f"tensor {name[:200]!r} takes {size} bytes, but its data has {length}")
    known = model.external.get(location)
    if known is None or known.end < offset + length:
        model.external[location] = Need(name, offset + length)
    if len(model.external) > MAX_LOCATIONS:
        raise FormatError(f"external data is in more than {MAX_LOCATIONS} files")


def _number(name: str, stated: Mapping[str, str], key: str, default: int) -> int:
    word = stated.get(key, str(default))
    if not word.isascii() or not word.isdecimal() or len(word) > 30:
        raise FormatError(f"the {key} of tensor {name[:200]!r} is not a number: {word[:60]!r}")
    return int(word)

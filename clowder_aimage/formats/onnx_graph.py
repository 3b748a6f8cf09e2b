"""The versions of an ONNX model, and the bytes of other files that it needs. No tensor is loaded.

Format: onnx/onnx, onnx/onnx.proto3 (the field numbers below are of the messages there), and
docs/ExternalData.md. Every place where a tensor can be is visited: initializers, attributes,
subgraphs in attributes, functions, training, and both halves of sparse tensors. A reader that
merged two fields of which there may be one would see another model: they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.format_result import OTHER
from clowder_aimage.formats.protobuf import BYTES, VARINT, WireField, WireReader, expect, signed
from clowder_aimage.tensor.dtype import MAX_ELEMENTS

MAX_DEPTH = 100  # messages in messages, as in the reference implementation of protobuf
MAX_RANK = 64
MAX_LOCATIONS = 8000
_MAX_TEXT = 4096  # bytes


class _Kind(Enum):
    MODEL = "ModelProto"
    TRAINING = "TrainingInfoProto"
    GRAPH = "GraphProto"
    FUNCTION = "FunctionProto"
    NODE = "NodeProto"
    ATTRIBUTE = "AttributeProto"
    TENSOR = "TensorProto"
    SPARSE = "SparseTensorProto"


_INNER: dict[_Kind, dict[int, _Kind]] = {
    _Kind.MODEL: {7: _Kind.GRAPH, 20: _Kind.TRAINING, 25: _Kind.FUNCTION},
    _Kind.TRAINING: {1: _Kind.GRAPH, 2: _Kind.GRAPH},
    _Kind.GRAPH: {1: _Kind.NODE, 5: _Kind.TENSOR, 15: _Kind.SPARSE},
    _Kind.FUNCTION: {7: _Kind.NODE, 11: _Kind.ATTRIBUTE},
    _Kind.NODE: {5: _Kind.ATTRIBUTE},
    _Kind.ATTRIBUTE: dict.fromkeys((5, 10), _Kind.TENSOR)
    | dict.fromkeys((6, 11), _Kind.GRAPH)
    | dict.fromkeys((22, 23), _Kind.SPARSE),
    _Kind.SPARSE: {1: _Kind.TENSOR, 2: _Kind.TENSOR},
}
_ONCE = {
    _Kind.MODEL: {1, 7},
    _Kind.TRAINING: {1, 2},
    _Kind.ATTRIBUTE: {5, 6, 22},
    _Kind.SPARSE: {1, 2},
}
# ModelProto's fields and their wire types: nothing else is written right in a model
_MODEL_FIELDS = dict.fromkeys((1, 5), VARINT) | dict.fromkeys(
    (2, 3, 4, 6, 7, 8, 14, 20, 25, 26), BYTES
)
# TensorProto.DataType: bits of an element; STRING (8) cannot be outside of the file
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
    """The first ``end`` bytes of an external file, which ``tensor`` needs."""

    tensor: str
    end: int


@dataclass(slots=True)
class OnnxModel:
    """Versions of a model, and the need of each location of external data."""

    ir_version: int = 0
    opset: int = 0
    external: dict[str, Need] = field(default_factory=dict)


@dataclass(slots=True)
class _Message:
    kind: _Kind
    fields: Iterator[WireField]
    seen: set[int] = field(default_factory=set)


def is_model(file: BinaryIO, size: int) -> bool:
    """Return whether a file could be an ONNX model, by its outermost fields."""
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
    wire, model = WireReader(file, size), OnnxModel()
    open_messages = [_Message(_Kind.MODEL, wire.fields(0, size))]
    found: set[int] = set()
    while open_messages:
        message = open_messages[-1]
        one = next(message.fields, None)
        if one is None:
            open_messages.pop()
        elif inner := _inner(message, one):
            if len(open_messages) > MAX_DEPTH:
                raise FormatError(f"at byte {one.place}, nested over {MAX_DEPTH} deep")
            if inner is _Kind.TENSOR:
                _read_tensor(wire, one, model)
            else:
                open_messages.append(_Message(inner, wire.fields(one.start, one.end)))
        elif message.kind is _Kind.MODEL:
            _read_versions(wire, one, model)
        if message.kind is _Kind.MODEL and one:
            found.add(one.number)
    if not {1, 7} <= found or model.ir_version < 1:
        raise FormatError(
            "this is not an ONNX model: it has no IR version, or no graph", hint=OTHER
        )
    return model


def _inner(message: _Message, one: WireField) -> _Kind | None:
    """Return the kind of message that a field holds, if it may lead to a tensor."""
    if one.number in _ONCE.get(message.kind, ()):
        if one.number in message.seen:
            raise FormatError(f"at byte {one.place}, {message.kind.value} has a field twice")
        message.seen.add(one.number)
    inner = _INNER[message.kind].get(one.number)
    if inner:
        expect(one, BYTES)
    return inner


def _read_versions(wire: WireReader, one: WireField, model: OnnxModel) -> None:
    if one.number == 1:
        expect(one, VARINT)
        model.ir_version = signed(one.value)
    elif one.number == 8:
        expect(one, BYTES)
        model.opset = max(model.opset, _opset(wire, one))


def _opset(wire: WireReader, message: WireField) -> int:
    """Return the version of an operator set if it is ONNX's own, else 0 (OperatorSetIdProto)."""
    domain, version = "", 0
    for one in wire.fields(message.start, message.end):
        if one.number == 1:
            domain = wire.text(one, _MAX_TEXT)
        elif one.number == 2:
            expect(one, VARINT)
            version = signed(one.value)
    return version if domain in ("", "ai.onnx") else 0


def _read_tensor(wire: WireReader, message: WireField, model: OnnxModel) -> None:
    """Note the bytes that a tensor needs of another file."""
    dims: list[int] = []
    kind, name, is_external = 0, "", False
    stated: dict[str, str] = {}
    for one in wire.fields(message.start, message.end):
        if one.number == 1:
            dims += map(signed, wire.varints(one, MAX_RANK))
            if len(dims) > MAX_RANK or min(dims, default=0) < 0:
                raise FormatError(f"at byte {one.place}, impossible dimensions of a tensor")
        elif one.number == 2:
            expect(one, VARINT)
            kind = one.value
        elif one.number == 8:
            name = wire.text(one, _MAX_TEXT)
        elif one.number == 13:
            _read_entry(wire, one, stated)
        elif one.number == 14:
            expect(one, VARINT)
            is_external = one.value == 1
    if is_external or stated:
        name = name or f"at byte {message.place}"
        elements = math.prod(dims)
        if elements > MAX_ELEMENTS:
            raise FormatError(f"tensor {name[:200]!r} has too many elements")
        _add_need(model, name, stated, (elements * _BITS.get(kind, 0) + 7) // 8)


def _read_entry(wire: WireReader, message: WireField, stated: dict[str, str]) -> None:
    """Add an entry of external_data (StringStringEntryProto)."""
    expect(message, BYTES)
    pair = {1: "", 2: ""}
    for one in wire.fields(message.start, message.end):
        if one.number in pair:
            pair[one.number] = wire.text(one, _MAX_TEXT)
    if pair[1] in stated:
        raise FormatError(f"at byte {message.place}, external data have {pair[1][:60]!r} twice")
    stated[pair[1]] = pair[2]


def _add_need(model: OnnxModel, name: str, stated: Mapping[str, str], size: int) -> None:
    location = stated.get("location")
    if not location:
        raise FormatError(f"tensor {name[:200]!r} is in another file, which is not named")
    offset = _number(name, stated, "offset", 0)
    length = _number(name, stated, "length", size)
    if length < size:
        raise FormatError(f"tensor {name[:200]!r} takes {size} bytes, and has {length} of them")
    known = model.external.get(location)
    if known is None or known.end < offset + length:
        model.external[location] = Need(name, offset + length)
    if len(model.external) > MAX_LOCATIONS:
        raise FormatError(f"tensors are in over {MAX_LOCATIONS} other files")


def _number(name: str, stated: Mapping[str, str], key: str, default: int) -> int:
    word = stated.get(key, str(default))
    if not word.isascii() or not word.isdecimal() or len(word) > 30:
        raise FormatError(f"tensor {name[:200]!r} has an {key} that is not a number: {word[:60]!r}")
    return int(word)

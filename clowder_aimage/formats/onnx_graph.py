"""What an ONNX model says of itself, and which bytes of other files it needs. No tensor is loaded.

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
    """The first ``end`` bytes of an external file, for ``tensor``; ``offset`` is where it begins,
    in bytes."""

    tensor: str
    offset: int
    end: int


@dataclass(slots=True)
class OnnxModel:
    """``parameters`` are the elements of all initializers; ``external`` has what is needed of each
    location."""

    ir_version: int = 0
    producer: str = ""
    opset: int = 0
    name: str = ""
    parameters: int = 0
    external: dict[str, Need] = field(default_factory=dict)


@dataclass(slots=True)
class _Message:
    kind: _Kind
    fields: Iterator[WireField]
    is_initializer: bool = False
    seen: set[int] = field(default_factory=set)


def is_model(file: BinaryIO, size: int) -> bool:
    """Whether a file could be an ONNX model, by the outermost fields."""
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
        FormatError: it is none, truncated, or says of a tensor what cannot be.
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
            weighs = _weighs(message, one)
            if inner is _Kind.TENSOR:
                _tensor(wire, one, model, weighs)
            else:
                open_messages.append(_Message(inner, wire.fields(one.start, one.end), weighs))
        elif message.kind is _Kind.MODEL:
            _model_field(wire, one, model)
        elif message.kind is _Kind.GRAPH and one.number == 2 and len(open_messages) == 2:
            model.name = wire.text(one, _MAX_TEXT)
        if message.kind is _Kind.MODEL and one:
            found.add(one.number)
    if not {1, 7} <= found or model.ir_version < 1:
        raise FormatError("this is no ONNX model: it has no IR version, or no graph", hint=OTHER)
    return model


def _inner(message: _Message, one: WireField) -> _Kind | None:
    """What message a field is, if it is one that may lead to a tensor."""
    if one.number in _ONCE.get(message.kind, ()):
        if one.number in message.seen:
            raise FormatError(f"at byte {one.place}, {message.kind.value} has a field twice")
        message.seen.add(one.number)
    inner = _INNER[message.kind].get(one.number)
    if inner:
        expect(one, BYTES)
    return inner


def _weighs(message: _Message, one: WireField) -> bool:
    """Whether a field is an initializer, or the values of a sparse one."""
    if message.kind is _Kind.SPARSE:
        return message.is_initializer and one.number == 1
    return message.kind is _Kind.GRAPH and one.number in (5, 15)


def _model_field(wire: WireReader, one: WireField, model: OnnxModel) -> None:
    if one.number == 1:
        expect(one, VARINT)
        model.ir_version = signed(one.value)
    elif one.number == 2:
        model.producer = wire.text(one, _MAX_TEXT)
    elif one.number == 8:
        expect(one, BYTES)
        model.opset = max(model.opset, _opset(wire, one))


def _opset(wire: WireReader, message: WireField) -> int:
    """The version of an operator set, if it is ONNX's own (OperatorSetIdProto)."""
    domain, version = "", 0
    for one in wire.fields(message.start, message.end):
        if one.number == 1:
            domain = wire.text(one, _MAX_TEXT)
        elif one.number == 2:
            expect(one, VARINT)
            version = signed(one.value)
    return version if domain in ("", "ai.onnx") else 0


def _tensor(wire: WireReader, message: WireField, model: OnnxModel, weighs: bool) -> None:
    """Count a tensor, and note what it needs of another file."""
    dims: list[int] = []
    kind, raw, name, is_external = 0, 0, "", False
    said: dict[str, str] = {}
    for one in wire.fields(message.start, message.end):
        if one.number == 1:
            dims += map(signed, wire.varints(one, MAX_RANK))
            if len(dims) > MAX_RANK or min(dims, default=0) < 0:
                raise FormatError(f"at byte {one.place}, no tensor has such dimensions")
        elif one.number == 2:
            expect(one, VARINT)
            kind = one.value
        elif one.number == 8:
            name = wire.text(one, _MAX_TEXT)
        elif one.number == 9:
            expect(one, BYTES)
            raw = one.end - one.start
        elif one.number == 13:
            _entry(wire, one, said)
        elif one.number == 14:
            expect(one, VARINT)
            is_external = one.value == 1
    name = name or f"at byte {message.place}"
    size = _size(name, dims, kind, raw)
    model.parameters += math.prod(dims) if weighs else 0
    if is_external or said:
        _need(model, name, said, size)


def _size(name: str, dims: list[int], kind: int, raw: int) -> int:
    """The bytes of a tensor's raw data, which are ``raw`` where they are in the model; 0 where the
    type is not known."""
    elements = math.prod(dims)
    if elements > MAX_ELEMENTS:
        raise FormatError(f"tensor {name[:200]!r} has more elements than can be")
    size = (elements * _BITS.get(kind, 0) + 7) // 8
    if raw and kind in _BITS and raw != size:
        raise FormatError(f"tensor {name[:200]!r} takes {size} bytes, and has {raw}")
    return size


def _entry(wire: WireReader, message: WireField, said: dict[str, str]) -> None:
    """One of external_data (StringStringEntryProto)."""
    expect(message, BYTES)
    pair = {1: "", 2: ""}
    for one in wire.fields(message.start, message.end):
        if one.number in pair:
            pair[one.number] = wire.text(one, _MAX_TEXT)
    if pair[1] in said:
        raise FormatError(f"at byte {message.place}, external data say {pair[1][:60]!r} twice")
    said[pair[1]] = pair[2]


def _need(model: OnnxModel, name: str, said: Mapping[str, str], size: int) -> None:
    location = said.get("location")
    if not location:
        raise FormatError(f"tensor {name[:200]!r} is in another file, and does not say in which")
    offset = _number(name, said, "offset", 0)
    length = _number(name, said, "length", size)
    if length < size:
        raise FormatError(f"tensor {name[:200]!r} takes {size} bytes, and has {length} of them")
    known = model.external.get(location)
    if known is None or known.end < offset + length:
        model.external[location] = Need(name, offset, offset + length)
    if len(model.external) > MAX_LOCATIONS:
        raise FormatError(f"tensors are in over {MAX_LOCATIONS} other files")


def _number(name: str, said: Mapping[str, str], key: str, default: int) -> int:
    word = said.get(key, str(default))
    if not word.isascii() or not word.isdecimal() or len(word) > 30:
        raise FormatError(f"tensor {name[:200]!r} has an {key} that is no number: {word[:60]!r}")
    return int(word)

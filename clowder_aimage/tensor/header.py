"""Dtypes and headers of the safetensors format: strict reading, byte-stable writing.

Format: https://github.com/huggingface/safetensors, "Format". Eight bytes hold the length of a
JSON object (unsigned, little-endian). The object maps names to dtype, shape and byte range
in the data that follows it. Input that the reference reader (its tensor.rs, release 0.8) rejects
is rejected here, and so is anything that two readers could interpret differently. Dtypes are its
``Dtype``; sub-byte types are packed: a tensor must end on a byte boundary, its rows need not.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from clowder_aimage.errors import FormatError

_NAMES = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
DTYPE_BITS = {name: bits for bits, names in _NAMES.items() for name in names.split()}
MAX_RANK = 32
"""Dimensions of one tensor; numpy before 2.0 has no more."""
MAX_ELEMENTS = 1 << 56
"""Of one tensor, zeros not counted: then no product, in bits, overflows 63 bits anywhere."""
MAX_HEADER_SIZE = 100_000_000
"""Bytes of the JSON object: the reference implementation's limit."""
MAX_TENSORS = 100_000
MAX_VALUES = 2_000_000
"""Values of the JSON object, about: MAX_TENSORS of four dimensions take 1.2 million. A header of
brackets alone would take gigabytes once it is Python objects."""
MAX_NAME = 1024
"""Characters of a tensor's name, as of a layer's: readers look at every part of it."""
METADATA = "__metadata__"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_LENGTH = struct.Struct("<Q")
# Bytes: a shorter header has fewer than MAX_VALUES
_LONG = 1 << 20
# Digits of the largest 64-bit number.
_DIGITS = 20
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file: dtype, shape (in elements), range (in bytes from the data)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. ``data_offset`` is the position of the data in the file, in bytes."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_offset: int


def compute_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a tensor of ``dtype`` and ``shape``.

    Raises:
        FormatError: The dtype is unknown, a dimension is negative, the size or the number of
            dimensions is too large, or a tensor of a sub-byte type ends inside a byte.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise FormatError(f"unknown dtype {dtype!r:.40}")
    if len(shape) > MAX_RANK:
        raise FormatError(f"{len(shape)} dimensions exceed the limit of {MAX_RANK}")
    # A zero must not hide large dimensions beside it: readers multiply in other orders.
    elements, factor = 1, 1
    for dimension in shape:
        if type(dimension) is not int or dimension < 0:
            raise FormatError(f"invalid dimension: {dimension!r:.40}")
        if dimension == 0:
            factor = 0
        else:
            elements *= dimension
            if elements > MAX_ELEMENTS:
                raise FormatError(f"shape {list(shape)!r:.100} is too large")
    size, remainder = divmod(elements * factor * bits, 8)
    if remainder:
        raise FormatError(f"{dtype} {list(shape)!r:.100} does not fill whole bytes")
    return size


def encode_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Encode the length and header of a file of ``tensors``: names, dtypes and shapes, in order.

    The bytes are the same for the same tensors: compact JSON, keys in the order dtype, shape,
    data_offsets, padded with spaces to a multiple of 8.

    Raises:
        FormatError: A name is invalid or duplicated, metadata are not text, the header exceeds the
            readers' limit, or ``nbytes`` fails.
    """
    _check_count(tensors)
    value: dict[str, Any] = {METADATA: _check_texts(dict(metadata))} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        if name in value or not _is_name(name):
            raise FormatError(f"invalid or duplicate tensor name: {name!r:.100}")
        end = offset + compute_nbytes(dtype, shape)
        value[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    # The data begins at a multiple of 8, so that a mapped file has aligned values.
    text = _ENCODER.encode(value).encode()
    text += b" " * (-len(text) % 8)
    _check_size(text)
    return _LENGTH.pack(len(text)) + text


class Readable(Protocol):
    """An open file."""

    def read(self, size: int, /) -> bytes: ...


def read_header(file: Readable, size: int) -> Header:
    """Read the header of an open safetensors file of ``size`` bytes.

    Raises FormatError if it is truncated, or its header does not match its data.
    """
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise FormatError(f"truncated: {len(prefix)} bytes, too few for a safetensors header")
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_HEADER_SIZE or length > size - _LENGTH.size:
        raise FormatError(f"invalid header length of {length} bytes in a file of {size} bytes")
    text = file.read(length)
    if len(text) < length:
        raise FormatError(f"truncated: the header has {len(text)} of {length} bytes")
    return parse_header(text, size - _LENGTH.size - length)


def parse_header(text: bytes, data_size: int | None) -> Header:
    """Parse a header whose data is ``data_size`` bytes long; with None, of any length.

    Raises FormatError if two readers could interpret the header differently.
    """
    if not text.startswith(b"{"):
        raise FormatError("the header is not a JSON object")
    _check_size(text)
    try:
        value: dict[str, Any] = _DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is not valid JSON: {error}") from None
    metadata = value.pop(METADATA, None)
    # MLX writes null if there are none.
    metadata = {} if metadata is None else _check_texts(metadata)
    _check_count(value)
    tensors = {name: _parse_tensor(name, item) for name, item in value.items()}
    _check_cover(tensors, data_size)
    return Header(tensors, metadata, _LENGTH.size + len(text))


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise FormatError("the header has a duplicate key")
    return value


def _parse_integer(digits: str) -> int:
    # The reference reader parses -0 as a float, Python as the integer 0. The conversion of many
    # digits takes quadratic time.
    if len(digits) > _DIGITS or digits == "-0":
        raise FormatError(f"the header has an invalid number: {digits:.40}")
    return int(digits)


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_build_object, parse_int=_parse_integer)


def _check_count(tensors: Sized) -> None:
    if len(tensors) > MAX_TENSORS:
        raise FormatError(f"{len(tensors)} tensors in one file exceed the limit of {MAX_TENSORS}")


def _check_size(text: bytes) -> None:
    if len(text) > MAX_HEADER_SIZE:
        raise FormatError(f"a header of {len(text)} bytes exceeds the limit of {MAX_HEADER_SIZE}")
    if len(text) > _LONG and sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise FormatError(f"the header has more than {MAX_VALUES} values")


def _check_texts(metadata: object) -> dict[str, str]:
    # JSON can encode lone surrogates. They are not valid text.
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) and _SURROGATE.search(text) is None
        for pair in metadata.items()
        for text in pair
    ):
        raise FormatError(f"{METADATA} must map strings to strings")
    return metadata


def _parse_tensor(name: str, item: object) -> TensorInfo:
    if not _is_name(name):
        raise FormatError(f"invalid tensor name: {name!r:.100}")
    if not isinstance(item, dict) or item.keys() != _FIELDS:
        raise FormatError(f"{name[:200]}: expected only dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise FormatError(f"{name[:200]}: dtype must be a string and shape a list")
    if not _is_range(offsets):
        raise FormatError(f"{name[:200]}: data_offsets must be two ascending numbers")
    try:
        size = compute_nbytes(dtype, shape)
    except FormatError as error:
        raise FormatError(f"{name[:200]}: {error}") from None
    start, end = offsets
    if size != end - start:
        raise FormatError(f"{name[:200]}: {dtype} {shape} requires {size} bytes, not {end - start}")
    return TensorInfo(dtype, tuple(shape), start, end)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name != METADATA and _CONTROL.search(name) is None


def _is_range(offsets: object) -> bool:
    return (
        isinstance(offsets, list)
        and [type(end) for end in offsets] == [int, int]
        and 0 <= offsets[0] <= offsets[1]
    )


def _check_cover(tensors: Mapping[str, TensorInfo], data_size: int | None) -> None:
    # A gap could hide data from scanners, and an overlap would make one tensor change another.
    offset = 0
    for name, info in sorted(tensors.items(), key=lambda pair: (pair[1].start, pair[1].end)):
        if info.start != offset:
            kind = "gap before" if info.start > offset else "overlap at"
            raise FormatError(f"{kind} tensor {name[:200]} (byte {info.start})")
        offset = info.end
    if data_size is not None and offset != data_size:
        raise FormatError(f"the tensors have {offset} bytes, the file has {data_size}")

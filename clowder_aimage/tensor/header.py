"""The safetensors header: read strictly, write one byte-stable form.

Format: https://github.com/huggingface/safetensors, "Format". Eight bytes hold the length of a
JSON object (unsigned, little-endian), which maps names to dtype, shape and the span of bytes
in the data that follows it. Stricter than the reference reader where two readers could see
different tensors: duplicate keys, holes and overlaps are all refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor.dtype import nbytes

MAX_HEADER_SIZE = 100 * 1024 * 1024  # the reference implementation's limit
MAX_TENSORS = 100_000
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: dtype, shape (in elements), span (in bytes, from the data's start)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A whole header. ``data_offset`` is where in the file the data begins, in bytes."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_offset: int


def encode_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The length and header of a file that holds ``tensors`` (name, dtype, shape) in that order.

    Always the same bytes for the same tensors: compact JSON, keys in the order dtype, shape,
    data_offsets, padded with spaces to a multiple of 8.

    Raises:
        FormatError: for a name that cannot be one or stands twice, and what ``nbytes`` refuses.
    """
    value: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        if name in value or not _is_name(name):
            raise FormatError(f"not a tensor name, or there twice: {name!r:.100}")
        end = offset + nbytes(dtype, shape)
        value[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def read_header(file: BinaryIO, size: int) -> Header:
    """Read the header of an open safetensors file of ``size`` bytes.

    Raises:
        FormatError: when the file is truncated, or its header lies about what follows.
    """
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise FormatError(f"truncated: {len(prefix)} bytes cannot hold a safetensors header")
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_HEADER_SIZE or length > size - _LENGTH.size:
        raise FormatError(f"the header claims {length} bytes of a file of {size}")
    text = file.read(length)
    if len(text) < length:
        raise FormatError(f"truncated: {len(text)} of {length} bytes of the header are there")
    return parse_header(text, size - _LENGTH.size - length)


def parse_header(text: bytes, data_size: int) -> Header:
    """Parse a header whose data is ``data_size`` bytes long.

    Raises:
        FormatError: for anything that two readers could understand differently.
    """
    if not text.startswith(b"{"):
        raise FormatError("the header is not a JSON object")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is not JSON: {error}") from None
    metadata = value.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{METADATA} must map strings to strings")
    if len(value) > MAX_TENSORS:
        raise FormatError(f"{len(value)} tensors in one file are over {MAX_TENSORS}")
    tensors = {name: _tensor(name, item) for name, item in value.items()}
    _check_cover(tensors, data_size)
    return Header(tensors, metadata, _LENGTH.size + len(text))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise FormatError("the header has a key twice")
    return value


def _tensor(name: str, item: object) -> TensorInfo:
    if not _is_name(name):
        raise FormatError(f"not a tensor name: {name!r:.100}")
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{name[:200]}: needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, span = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise FormatError(f"{name[:200]}: dtype must be a string and shape a list")
    if not _is_span(span):
        raise FormatError(f"{name[:200]}: data_offsets must be two rising numbers")
    if nbytes(dtype, shape) != span[1] - span[0]:
        raise FormatError(f"{name[:200]}: {dtype} {shape} does not fill {span[1] - span[0]} bytes")
    return TensorInfo(dtype, tuple(shape), span[0], span[1])


def _is_name(name: str) -> bool:
    """Not empty, not taken, and without control characters or halves of surrogate pairs."""
    return (
        name not in ("", METADATA)
        and not any(ord(c) < 32 or ord(c) == 127 for c in name)
        and not any(0xD800 <= ord(c) <= 0xDFFF for c in name)
    )


def _is_span(span: object) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) for n in span)
        and 0 <= span[0] <= span[1]
    )


def _check_cover(tensors: Mapping[str, TensorInfo], data_size: int) -> None:
    """The spans must cover the data from its start to its end, once."""
    offset = 0
    for name, info in sorted(tensors.items(), key=lambda pair: (pair[1].start, pair[1].end)):
        if info.start != offset:
            kind = "a hole before" if info.start > offset else "an overlap at"
            raise FormatError(f"{kind} tensor {name[:200]} (byte {info.start})")
        offset = info.end
    if offset != data_size:
        raise FormatError(f"the tensors fill {offset} bytes, the file holds {data_size}")

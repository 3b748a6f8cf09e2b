"""A strict reader of GGUF headers: metadata and tensor infos, but no weights.

Format: ggml-org/ggml, docs/gguf.md, "File Structure". Input that this text or the reference reader
(ggml-org/llama.cpp, ggml/src/gguf.cpp) rejects is rejected here. Counts are compared with the
remaining bytes before they are used, so that a false count costs no time and no memory.
Newer types than in that text: gguf-py/gguf/constants.py (GGML_QUANT_SIZES) of llama.cpp.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.model_tree import OTHER

MAGIC = b"GGUF"
BIG_ENDIAN = b"FUGG"
# The magic numbers of GGML, GGMF, GGJT and GGLA, which are little-endian words.
OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")
VERSIONS = (2, 3)
MAX_KEYS = 65_536
# Bytes, as in the specification.
MAX_KEY = 65_535
MAX_TENSORS = 100_000
# Bytes: 64 in the specification, 127 with GGML_MAX_NAME of 128 (stable-diffusion.cpp).
MAX_NAME = 127
MAX_DIMENSIONS = 4
# Strings and lists inside lists; a large vocabulary has 1 million.
MAX_ITEMS = 4_000_000
# Nested lists.
MAX_DEPTH = 4
MAX_ALIGNMENT = 1 << 20
# enum gguf_metadata_value_type
SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in zip((*range(8), 10, 11, 12), "BbHhIifBQqd", strict=True)
}
UINT8, INT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 0, 1, 4, 5, 6, 7, 8, 9
# enum ggml_type: elements per block; by number: name and bytes per block
_BLOCKS = {
    1: "0 F32 4, 1 F16 2, 24 I8 1, 25 I16 2, 26 I32 4, 27 I64 8, 28 F64 8, 30 BF16 2",
    32: "2 Q4_0 18, 3 Q4_1 20, 6 Q5_0 22, 7 Q5_1 24, 8 Q8_0 34, 9 Q8_1 40, 20 IQ4_NL 18, "
    "39 MXFP4 17",
    64: "40 NVFP4 36, 42 Q2_0 18",
    128: "41 Q1_0 18",
    256: "10 Q2_K 84, 11 Q3_K 110, 12 Q4_K 144, 13 Q5_K 176, 14 Q6_K 210, 15 Q8_K 292, "
    "16 IQ2_XXS 66, 17 IQ2_XS 74, 18 IQ3_XXS 98, 19 IQ1_S 50, 21 IQ3_S 110, 22 IQ2_S 82, "
    "23 IQ4_XS 136, 29 IQ1_M 56, 34 TQ1_0 54, 35 TQ2_0 66",
}
TENSORS = {
    int(number): (name, block, int(size))
    for block, types in _BLOCKS.items()
    for number, name, size in map(str.split, types.split(","))
}
# Types that current readers no longer support.
REMOVED = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
SHAPES = "comfy.gguf.orig_shape."
"""Before a tensor's name: its shape, if rows were joined to make whole blocks (ComfyUI-GGUF)."""
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_METADATA_PREFIXES = ("general.", "split.", "adapter.")
_METADATA_SUFFIX = ".context_length"
# Dimensions in a shape of SHAPES.
_MAX_RANK = 8
# Bytes of the longest string in the metadata; longer ones are skipped.
_MAX_STRING = 4096
# The limit for complete metadata, which includes chat templates.
_MAX_LONG_STRING = 1 << 24
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# Minimal sizes: a key of 1 byte, a type, a value of 1 byte; a name, no dimensions.
_LEAST_PAIR, _LEAST_TENSOR, _LEAST_TEXT, _LEAST_LIST = 8 + 1 + 4 + 1, 8 + 4 + 4 + 8, 8, 12


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file; ``shape`` is in the file's order: the row's length first.

    ``offset``, from the file's start, and ``nbytes`` are in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufList:
    """A list in the metadata; ``kind`` is the number of its type. Strings are bytes."""

    kind: int
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header; ``metadata`` has the scalars and short strings that describe the model."""

    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """A position in a file of ``size`` bytes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.position = 0
        self._items = 0

    def take(self, count: int, label: str) -> bytes:
        self._check(count, label)
        data = self._file.read(count)
        if len(data) < count:
            raise FormatError(f"truncated: {label} ends early, after byte {self.position}")
        self.position += count
        return data

    def skip(self, count: int, label: str) -> None:
        self._check(count, label)
        self.position += count
        self._file.seek(self.position)

    def _check(self, count: int, label: str) -> None:
        remaining = self._size - self.position
        if count > remaining:
            raise FormatError(
                f"at byte {self.position}, {label} takes {count} bytes, but {remaining} are "
                "left: truncated or damaged"
            )

    def read_number(self, form: struct.Struct, label: str) -> Any:
        return form.unpack(self.take(form.size, label))[0]

    def read_count(self, label: str, min_size: int, limit: int) -> int:
        """Read a count of items of at least ``min_size`` bytes each."""
        position = self.position
        count: int = self.read_number(_U64, f"the number of {label}")
        remaining = self._size - self.position
        if count > limit or count * min_size > remaining:
            raise FormatError(
                f"at byte {position}, {count} {label} do not fit in {remaining} bytes"
            )
        return count

    def read_short_text(self, label: str, limit: int) -> str | None:
        """Return a string; skip it and return None if it is longer than ``limit`` bytes."""
        position, length = self.position, self.read_number(_U64, f"the length of {label}")
        if length <= limit:
            return self._decode(position, length, label)
        self.skip(length, label)
        return None

    def read_text(self, label: str, limit: int) -> str:
        position, length = self.position, self.read_number(_U64, f"the length of {label}")
        if length > limit:
            raise FormatError(
                f"at byte {position}, {label} has {length} bytes; the limit is {limit}"
            )
        return self._decode(position, length, label)

    def read_string(self, is_kept: bool) -> bytes | None:
        """Return the bytes of a string in a list, or skip it."""
        length = self.read_number(_U64, "the length of a string")
        if is_kept:
            return self.take(length, "a string")
        self.skip(length, "a string")
        return None

    def _decode(self, position: int, length: int, label: str) -> str:
        try:
            return self.take(length, label).decode()
        except UnicodeDecodeError:
            raise FormatError(f"at byte {position}, {label} is not UTF-8") from None

    def read_item_count(self, label: str, min_size: int) -> int:
        """Read the item count of a list; the total over all lists of a file is bounded."""
        count = self.read_count(label, min_size, MAX_ITEMS)
        self._items += count
        if self._items > MAX_ITEMS:
            raise FormatError(f"at byte {self.position}, lists contain more than {MAX_ITEMS} items")
        return count


def read_header(file: BinaryIO, size: int, *, is_whole: bool = False) -> GgufHeader:
    """Read the header of an open file of ``size`` bytes.

    is_whole: read all metadata, with lists as GgufList, except nested lists.

    Raises:
        FormatError: The file is not GGUF, is truncated, or its header does not match its data.
    """
    cursor = _Cursor(file, size)
    version = _read_version(cursor)
    tensor_count = cursor.read_count("tensors", _LEAST_TENSOR, MAX_TENSORS)
    pairs = cursor.read_count("metadata", _LEAST_PAIR, MAX_KEYS)
    metadata = _read_metadata(cursor, pairs, is_whole)
    alignment: int = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    infos = [_read_tensor(cursor, alignment) for _ in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(replace(info, offset=start + info.offset) for info in infos)
    _check_ranges(tensors, size)
    return GgufHeader(version, metadata, tensors)


def find_value(head: bytes, key: str) -> str | int | None:
    """Return a string or UINT32 of the metadata in the first bytes of a file; None if cut off."""
    # The key is searched for as bytes, since parsing the lists of a vocabulary is slow.
    # A false match in a string is harmless: callers only describe a model.
    name = key.encode()
    offset = head.find(_U64.pack(len(name)) + name) + _U64.size + len(name)
    kind = head[offset : offset + _U32.size]
    if offset < _U64.size + len(name) or len(kind) < _U32.size:
        return None
    value = head[offset + _U32.size :][: _U64.size]
    if kind == _U32.pack(UINT32) and len(value) >= _U32.size:
        return int(_U32.unpack_from(value)[0])
    if kind != _U32.pack(STRING) or len(value) < _U64.size:
        return None
    start = offset + _U32.size + _U64.size
    end = start + _U64.unpack(value)[0]
    return head[start:end].decode(errors="replace") if end <= len(head) else None


def count_tensors(head: bytes) -> int:
    """Return the number of tensors that the first bytes of a file state; 0 if they are cut off."""
    # After the magic number and the version
    start = 2 * _U32.size
    count = head[start : start + _U64.size]
    return int(_U64.unpack(count)[0]) if len(count) == _U64.size else 0


def has_tensor(head: bytes, name: str) -> bool:
    """Return True if the first bytes of a file have the name of a tensor."""
    encoded = name.encode()
    return _U64.pack(len(encoded)) + encoded in head


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "the magic number")
    if magic in OLDER:
        raise FormatError("this is a GGML file, the predecessor of GGUF", hint="convert it to GGUF")
    if magic not in (MAGIC, BIG_ENDIAN):
        raise FormatError(f"not a GGUF file: it begins with {magic!r}, not GGUF", hint=OTHER)
    version: int = cursor.read_number(_U32, "the version")
    # Older big-endian files have the same magic, and a byte-swapped version.
    if magic == BIG_ENDIAN or not version & 0xFFFF:
        raise FormatError(
            "this GGUF file is big-endian; only little-endian files are supported",
            hint="convert it with gguf-convert-endian",
        )
    if version not in VERSIONS:
        raise FormatError(
            f"at byte 4, unsupported GGUF version {version}: expected 2 or 3",
            hint="convert the model again with a current converter" if version < 2 else None,
        )
    return version


def _read_metadata(cursor: _Cursor, pairs: int, is_whole: bool) -> dict[str, Any]:
    keys: set[str] = set()
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        position = cursor.position
        key = cursor.read_text("a key", MAX_KEY)
        if not key or not key.isascii() or not key.isprintable() or key in keys:
            raise FormatError(f"at byte {position}, invalid or duplicate key: {key!r:.100}")
        keys.add(key)
        is_kept = (
            is_whole
            or key.startswith((*_METADATA_PREFIXES, SHAPES))
            or key.endswith(_METADATA_SUFFIX)
        )
        position, kind = cursor.position, cursor.read_number(_U32, "the type of a value")
        limit = (_MAX_LONG_STRING if is_whole else _MAX_STRING) if is_kept else 0
        value = _read_value(cursor, kind, key, limit, is_whole)
        if key == _ALIGNMENT and not _is_alignment(kind, value):
            raise FormatError(
                f"at byte {position}, {key} must be a UINT32 power of two from 8 to "
                f"{MAX_ALIGNMENT}, not {value!r:.40}"
            )
        if is_kept and value is not None:
            metadata[key] = value
    return metadata


def _is_alignment(kind: int, value: Any) -> bool:
    return kind == UINT32 and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0


def _read_value(cursor: _Cursor, kind: int, key: str, limit: int, is_whole: bool) -> Any:
    """Return a value; None for skipped lists and for strings longer than ``limit``."""
    position = cursor.position
    if form := SCALARS.get(kind):
        value = cursor.read_number(form, f"the value of {key[:100]}")
        if kind != BOOL:
            return value
        if value > 1:
            raise FormatError(f"at byte {position}, {key[:100]} is {value}, not true or false")
        return bool(value)
    if kind == STRING:
        return cursor.read_short_text(key[:100], limit)
    if kind == ARRAY:
        return _read_shape(cursor, key) if key.startswith(SHAPES) else _read_list(cursor, is_whole)
    raise FormatError(f"at byte {position - 4}, {key[:100]} has an unknown type: {kind}")


def _read_shape(cursor: _Cursor, key: str) -> tuple[int, ...]:
    position, kind = cursor.position, cursor.read_number(_U32, "the type of a list")
    form = SCALARS[INT32]
    count = cursor.read_count("values", form.size, 1 << 60)
    if kind != INT32 or count > _MAX_RANK:
        raise FormatError(f"at byte {position}, {key[:200]} is not a short list of INT32")
    return tuple(cursor.read_number(form, key[:200]) for _ in range(count))


def _read_list(cursor: _Cursor, is_kept: bool, depth: int = 1) -> GgufList | None:
    """Return a list of scalars or strings; None if it is skipped."""
    position, kind = cursor.position, cursor.read_number(_U32, "the type of a list")
    if kind == ARRAY:
        if depth > MAX_DEPTH:
            raise FormatError(f"at byte {position}, lists are nested more than {MAX_DEPTH} deep")
        for _ in range(cursor.read_item_count("lists", _LEAST_LIST)):
            _read_list(cursor, False, depth + 1)
        return None
    if kind == STRING:
        count = cursor.read_item_count("strings", _LEAST_TEXT)
        texts = [cursor.read_string(is_kept) for _ in range(count)]
        return GgufList(kind, tuple(texts)) if is_kept else None
    if (form := SCALARS.get(kind)) is None:
        raise FormatError(f"at byte {position}, a list has an unknown type: {kind}")
    count = cursor.read_count("values", form.size, MAX_ITEMS if is_kept else 1 << 60)
    if not is_kept:
        cursor.skip(count * form.size, "a list")
        return None
    data = cursor.take(count * form.size, "a list")
    return GgufList(kind, struct.unpack(f"<{count}{form.format[1:]}", data))


def _read_tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """Return a tensor's info, with an offset relative to the start of the data."""
    name = cursor.read_text("a tensor's name", MAX_NAME)
    position, rank = cursor.position, cursor.read_number(_U32, f"the rank of {name}")
    if rank > MAX_DIMENSIONS:
        raise FormatError(
            f"at byte {position}, {name} has {rank} dimensions; the limit is {MAX_DIMENSIONS}"
        )
    shape = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"the shape of {name}"))
    position, number = cursor.position, cursor.read_number(_U32, f"the type of {name}")
    if number not in TENSORS:
        problem = "a type that was removed from GGUF" if number in REMOVED else "an unknown type"
        raise FormatError(f"at byte {position}, {name} has {problem}: {number}")
    kind, block, size = TENSORS[number]
    if (shape[0] if shape else 1) % block:
        rows = f"rows of {name} {shape[:1]}"
        raise FormatError(f"at byte {position}, {rows} are not whole blocks of {kind}")
    position, offset = cursor.position, cursor.read_number(_U64, f"the offset of {name}")
    if offset % alignment:
        raise FormatError(
            f"at byte {position}, {name} is at {offset}, not a multiple of {alignment}"
        )
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // block * size)


def _check_ranges(tensors: tuple[GgufTensor, ...], size: int) -> None:
    """Check that names are unique, and that data ranges lie in the file and do not overlap."""
    names = Counter(tensor.name for tensor in tensors)
    for name, count in names.items():
        if not name or count > 1:
            raise FormatError(f"duplicate or empty tensor name: {name!r}")
    # Gaps are allowed: data are padded to the alignment.
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset < end:
            raise FormatError(f"tensor {tensor.name} overlaps another at byte {tensor.offset}")
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise FormatError(
                f"tensor {tensor.name} ends at byte {end} of {size}: truncated or damaged"
            )

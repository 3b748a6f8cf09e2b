"""The header of a GGUF file, read strictly: metadata and tensors, no weights.

Format: ggml-org/ggml, docs/gguf.md, "File Structure". What that text and the reference reader
(ggml-org/llama.cpp, ggml/src/gguf.cpp) refuse is refused here. Counts are held against the bytes
that are left before anything is read by them, so that a lie costs neither time nor memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.formats import gguf_type
from clowder_aimage.formats.format_result import OTHER

MAGIC = b"GGUF"
BIG_ENDIAN = b"FUGG"
OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # GGML, GGMF, GGJT, GGLA
VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_KEY = 65_535  # bytes, as the specification has it
MAX_TENSORS = 100_000
MAX_NAME = 127  # bytes: 64 in the specification, 127 where GGML_MAX_NAME is 128
MAX_DIMENSIONS = 4
MAX_ITEMS = (
    4_000_000  # strings and lists in the lists of one file; a large vocabulary has 1 million
)
MAX_DEPTH = 4  # lists in lists
MAX_ALIGNMENT = 1 << 20
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_KEPT = ("general.", "split.", "adapter.")
_KEPT_END = ".context_length"
_MAX_KEPT = 4096  # bytes of a string that is kept
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# the least that one takes: a key of 1 byte, a type, a value of 1 byte; a name, no dimensions
_LEAST_PAIR, _LEAST_TENSOR, _LEAST_TEXT, _LEAST_LIST = 8 + 1 + 4 + 1, 8 + 4 + 4 + 8, 8, 12


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """``shape`` as in the file: the row's length first.

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
class GgufHeader:
    """``metadata`` has the scalars, and the short strings, that say what the model is."""

    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """A place in a file of ``size`` bytes that is never left behind."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.position = 0
        self.items = 0

    @property
    def left(self) -> int:
        return self._size - self.position

    def take(self, count: int, what: str) -> bytes:
        self._check(count, what)
        data = self._file.read(count)
        if len(data) < count:
            raise FormatError(f"truncated: {what} breaks off after byte {self.position}")
        self.position += count
        return data

    def skip(self, count: int, what: str) -> None:
        self._check(count, what)
        self.position += count
        self._file.seek(self.position)

    def _check(self, count: int, what: str) -> None:
        if count > self.left:
            raise FormatError(
                f"at byte {self.position}, {what} takes {count} bytes, of which {self.left} are "
                "there: truncated, or a lie"
            )

    def number(self, form: struct.Struct, what: str) -> Any:
        return form.unpack(self.take(form.size, what))[0]

    def count(self, what: str, least: int, most: int) -> int:
        """Read a count of items of at least ``least`` bytes each."""
        place = self.position
        count: int = self.number(_U64, f"the number of {what}")
        if count > most or count * least > self.left:
            raise FormatError(f"at byte {place}, {count} {what} cannot be in {self.left} bytes")
        return count

    def text(self, what: str, most: int) -> str:
        place = self.position
        length = self.number(_U64, f"the length of {what}")
        if length > most:
            raise FormatError(f"at byte {place}, {what} is {length} bytes long, over {most}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise FormatError(f"at byte {place}, {what} is not UTF-8") from None

    def skip_text(self) -> None:
        self.skip(self.number(_U64, "the length of a string"), "a string")

    def add_items(self, count: int) -> None:
        self.items += count
        if self.items > MAX_ITEMS:
            raise FormatError(f"at byte {self.position}, lists hold over {MAX_ITEMS} items")


def read_header(file: BinaryIO, size: int) -> GgufHeader:
    """Read the header of an open file of ``size`` bytes.

    Raises:
        FormatError: it is no GGUF file, truncated, or lies about what follows.
    """
    cursor = _Cursor(file, size)
    version = _version(cursor)
    tensor_count = cursor.count("tensors", _LEAST_TENSOR, MAX_TENSORS)
    pairs = cursor.count("metadata", _LEAST_PAIR, MAX_KEYS)
    metadata = _metadata(cursor, pairs)
    alignment: int = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    infos = [_tensor(cursor, alignment) for _ in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(
        GgufTensor(info.name, info.type, info.shape, start + info.offset, info.nbytes)
        for info in infos
    )
    _check_names(tensors)
    _check_spans(tensors, size)
    return GgufHeader(version, metadata, tensors)


def _version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "the magic number")
    if magic in OLDER:
        raise FormatError(
            "this is the format GGML, which came before GGUF", hint="convert it to GGUF"
        )
    if magic not in (MAGIC, BIG_ENDIAN):
        raise FormatError(f"a GGUF file begins with GGUF, this one with {magic!r}", hint=OTHER)
    version: int = cursor.number(_U32, "the version")
    # until big-endian files had a magic of their own, their version alone told
    if magic == BIG_ENDIAN or not version & 0xFFFF:
        raise FormatError(
            "this GGUF file is big-endian, and only little-endian ones are packed",
            hint="convert it with gguf-convert-endian",
        )
    if version not in VERSIONS:
        raise FormatError(
            f"at byte 4, version {version} of GGUF, of which 2 and 3 are known",
            hint="convert the model again with a current program" if version < 2 else None,
        )
    return version


def _metadata(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    seen: set[str] = set()
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        place = cursor.position
        key = cursor.text("a key", MAX_KEY)
        if not key or not key.isascii() or not key.isprintable() or key in seen:
            raise FormatError(f"at byte {place}, not a key, or there twice: {key!r:.100}")
        seen.add(key)
        kept = key.startswith(_KEPT) or key.endswith(_KEPT_END)
        place, kind = cursor.position, cursor.number(_U32, "the type of a value")
        value = _value(cursor, kind, key, kept)
        if key == _ALIGNMENT and not _is_alignment(kind, value):
            raise FormatError(f"at byte {place}, {key} is {value!r:.40}, not a power of two from 8")
        if kept and value is not None:
            metadata[key] = value
    return metadata


def _is_alignment(kind: int, value: Any) -> bool:
    return kind == gguf_type.UINT32 and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0


def _value(cursor: _Cursor, kind: int, key: str, kept: bool) -> Any:
    """Return the value; None for lists and for strings that are not kept."""
    place = cursor.position
    if form := gguf_type.SCALARS.get(kind):
        value = cursor.number(form, f"the value of {key[:100]}")
        if kind != gguf_type.BOOL:
            return value
        if value > 1:
            raise FormatError(f"at byte {place}, {key[:100]} is {value}, not true or false")
        return bool(value)
    if kind == gguf_type.STRING:
        return _string(cursor, key, _MAX_KEPT if kept else 0)
    if kind == gguf_type.ARRAY:
        _skip_list(cursor)
        return None
    raise FormatError(f"at byte {place - 4}, {key[:100]} has a type that is not known: {kind}")


def _string(cursor: _Cursor, key: str, most: int) -> str | None:
    """Return a string, if it is no longer than ``most`` bytes."""
    place = cursor.position
    length = cursor.number(_U64, f"the length of {key[:100]}")
    if length > most:
        cursor.skip(length, key[:100])
        return None
    try:
        return cursor.take(length, key[:100]).decode()
    except UnicodeDecodeError:
        raise FormatError(f"at byte {place}, {key[:100]} is not UTF-8") from None


def _skip_list(cursor: _Cursor) -> None:
    """Pass over a list, and the lists in it: what is left to do of those around is in ``open``."""
    open_lists = [1]
    while open_lists:
        if not open_lists[-1]:
            open_lists.pop()
            continue
        open_lists[-1] -= 1
        place, kind = cursor.position, cursor.number(_U32, "the type of a list")
        if kind == gguf_type.ARRAY:
            if len(open_lists) > MAX_DEPTH:
                raise FormatError(f"at byte {place}, lists are nested over {MAX_DEPTH} deep")
            open_lists.append(cursor.count("lists", _LEAST_LIST, MAX_ITEMS))
            cursor.add_items(open_lists[-1])
        elif kind == gguf_type.STRING:
            count = cursor.count("strings", _LEAST_TEXT, MAX_ITEMS)
            cursor.add_items(count)
            for _ in range(count):
                cursor.skip_text()
        elif form := gguf_type.SCALARS.get(kind):
            cursor.skip(cursor.count("values", form.size, 1 << 60) * form.size, "a list")
        else:
            raise FormatError(f"at byte {place}, a list has a type that is not known: {kind}")


def _tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """Return a tensor's info; its offset is from the start of the data still."""
    name = cursor.text("a tensor's name", MAX_NAME)
    place, rank = cursor.position, cursor.number(_U32, f"the rank of {name}")
    if rank > MAX_DIMENSIONS:
        raise FormatError(f"at byte {place}, {name} has {rank} dimensions, over {MAX_DIMENSIONS}")
    shape = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"the shape of {name}"))
    place, number = cursor.position, cursor.number(_U32, f"the type of {name}")
    if number not in gguf_type.TENSORS:
        past = "that was removed from GGUF" if number in gguf_type.REMOVED else "that is not known"
        raise FormatError(f"at byte {place}, {name} has a type {past}: {number}")
    kind, block, size = gguf_type.TENSORS[number]
    if (shape[0] if shape else 1) % block:
        raise FormatError(f"at byte {place}, rows of {shape[:1]} are no blocks of {kind} in {name}")
    place, offset = cursor.position, cursor.number(_U64, f"the offset of {name}")
    if offset % alignment:
        raise FormatError(f"at byte {place}, {name} is at {offset}, no multiple of {alignment}")
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // block * size)


def _check_names(tensors: tuple[GgufTensor, ...]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if not tensor.name or tensor.name in seen:
            raise FormatError(f"two tensors are called {tensor.name!r}, or one is called nothing")
        seen.add(tensor.name)


def _check_spans(tensors: tuple[GgufTensor, ...], size: int) -> None:
    """Check that every tensor lies in the file, and none overlaps another."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset < end:
            raise FormatError(
                f"tensor {tensor.name} begins inside another, at byte {tensor.offset}"
            )
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise FormatError(
                f"tensor {tensor.name} ends at byte {end}, the file at {size}: truncated, or a lie"
            )

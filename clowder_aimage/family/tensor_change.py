"""Values in the order of another layout: channels last, halves exchanged. No numerics library."""

from __future__ import annotations

import array
from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.errors import FormatError
from clowder_aimage.family.name_table import TensorChange, TensorPlace
from clowder_aimage.tensor import DTYPE_BITS
from clowder_aimage.tensor.weight import DecodedRows, FileRange, SourceTensor

_CODES = {8: "B", 16: "H", 32: "I", 64: "Q"}
_PART = 4 * 1024 * 1024  # bytes that are read at a time


def transpose(data: bytes | memoryview, dtype: str, first: int, second: int) -> bytes:
    """Return matrices of ``first`` rows and ``second`` columns, each transposed."""
    code = _CODES[DTYPE_BITS[dtype]]
    values = array.array(code, bytes(data))
    made = array.array(code, bytes(len(data)))
    size = first * second
    for start in range(0, len(values), size):
        for row in range(first):
            made[start + row : start + size : first] = values[
                start + row * second : start + (row + 1) * second
            ]
    return made.tobytes()


def last_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution with its channels last."""
    return (shape[0], *shape[2:], shape[1])


def to_channels_last(data: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the values of a convolution of ``shape`` [out, in, height, width], channels last."""
    return transpose(data, dtype, shape[1], shape[2] * shape[3])


def restore(tensor: SourceTensor, name: str, place: TensorPlace) -> SourceTensor:
    """Return a tensor of another layout, or its rows, as diffusers' tensor ``name``.

    Raises:
        FormatError: Its shape does not allow the change.
    """
    if place.parts > 1:
        rows = tensor.shape[0] if tensor.shape else 0
        if not rows or rows % place.parts:
            raise _unfit(tensor, f"must have a multiple of {place.parts} rows")
        size = rows // place.parts
        tensor = tensor.rows(name, place.part * size, (place.part + 1) * size)
    return _restored(tensor, name, place.change)


def _restored(tensor: SourceTensor, name: str, change: TensorChange) -> SourceTensor:
    shape = tensor.shape
    match change:
        case TensorChange.UNIT_KERNEL if shape[2:] == (1, 1):
            return tensor.rename(name, shape[:2])
        case TensorChange.CHANNELS_LAST if len(shape) == 4:
            shape = (shape[0], shape[3], *shape[1:3])
            decoder = _ChannelsFirst(tensor.file_range, tensor.dtype, shape)
            return tensor.rename(name, shape).decoding(decoder, tensor.dtype, shape)
        case TensorChange.HALVES:
            if not shape or shape[0] % 2:
                raise _unfit(tensor, "must have an even number of rows")
            halves = _Halves(tensor)
            return tensor.rename(name, shape).decoding(halves, tensor.dtype, shape)
    return tensor.rename(name, shape)


def _unfit(tensor: SourceTensor, why: str) -> FormatError:
    return FormatError(f"{tensor.path}: {tensor.name[:200]} {list(tensor.shape)} {why}")


@dataclass(frozen=True, slots=True)
class _ChannelsFirst:
    """A convolution of ``shape`` [out, in, height, width] whose channels are last in the file."""

    span: FileRange
    dtype: str
    shape: tuple[int, ...]

    def decode(self, start: int, stop: int) -> Iterator[bytes]:
        _, channels, height, width = self.shape
        row = self.span.nbytes // self.shape[0] if self.shape[0] else 0
        step = max(1, _PART // max(1, row))
        for first in range(start, stop, step):
            data = read_rows(self.span, row, first, min(first + step, stop))
            yield transpose(data, self.dtype, height * width, channels)


@dataclass(frozen=True, slots=True)
class _Halves:
    """A tensor whose first half of rows is the second half in the file."""

    tensor: SourceTensor

    def decode(self, start: int, stop: int) -> Iterator[bytes]:
        count = self.tensor.shape[0]
        row = self.tensor.nbytes // count
        step = max(1, _PART // max(1, row))
        while start < stop:
            place = (start + count // 2) % count
            size = min(step, stop - start, count - place)
            yield read_rows(self.tensor.file_range, row, place, place + size)
            start += size


def read_rows(span: FileRange, row: int, start: int, stop: int) -> bytes:
    """Return rows of ``row`` bytes; fewer if the file became shorter. Raises OSError."""
    if span.decoded is not None:
        rows = DecodedRows(
            span.decoded.decoder, span.decoded.start + start, span.decoded.start + stop
        )
        return b"".join(map(bytes, rows.parts()))
    with span.path.open("rb") as file:
        file.seek(span.offset + start * row)
        return file.read((stop - start) * row)

"""Values in the order of another layout: channels last, halves exchanged. numpy is not needed."""

from __future__ import annotations

import array
from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.errors import FormatError
from clowder_aimage.family.name_table import TensorChange, TensorLocation
from clowder_aimage.tensor import DTYPE_BITS
from clowder_aimage.tensor.weight import DecodedRows, FileRange, SourceTensor

_CODES = {8: "B", 16: "H", 32: "I", 64: "Q"}
# Bytes that are read at a time.
_CHUNK_SIZE = 4 * 1024 * 1024


def transpose(data: bytes | memoryview, dtype: str, rows: int, columns: int) -> bytes:
    """Return matrices of ``rows`` rows and ``columns`` columns, each transposed."""
    code = _CODES[DTYPE_BITS[dtype]]
    values = array.array(code, bytes(data))
    # Slices with a step copy rows in C, without a library.
    transposed = array.array(code, bytes(len(data)))
    size = rows * columns
    for start in range(0, len(values), size):
        for row in range(rows):
            transposed[start + row : start + size : rows] = values[
                start + row * columns : start + (row + 1) * columns
            ]
    return transposed.tobytes()


def permute_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution with its channels last."""
    return (shape[0], *shape[2:], shape[1])


def to_channels_last(data: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the values of a convolution of ``shape`` [out, in, height, width], channels last."""
    return transpose(data, dtype, shape[1], shape[2] * shape[3])


def restore(tensor: SourceTensor, name: str, location: TensorLocation) -> SourceTensor:
    """Return a tensor of another layout, or its rows, as diffusers' tensor ``name``.

    Raises:
        FormatError: Its shape does not allow the change.
    """
    if location.count > 1:
        rows = tensor.shape[0] if tensor.shape else 0
        if not rows or rows % location.count:
            raise _build_error(tensor, f"must have a multiple of {location.count} rows")
        size = rows // location.count
        tensor = tensor.slice_rows(name, location.index * size, (location.index + 1) * size)
    return _change_order(tensor, name, location.change)


def _change_order(tensor: SourceTensor, name: str, change: TensorChange) -> SourceTensor:
    shape = tensor.shape
    match change:
        case TensorChange.UNIT_KERNEL if shape[2:] == (1, 1):
            return tensor.rename(name, shape[:2])
        case TensorChange.CHANNELS_LAST if len(shape) == 4:
            shape = (shape[0], shape[3], *shape[1:3])
            decoder = _ChannelsFirst(tensor.file_range, tensor.dtype, shape)
            return tensor.rename(name, shape).with_decoder(decoder, tensor.dtype, shape)
        case TensorChange.HALVES:
            if not shape or shape[0] % 2:
                raise _build_error(tensor, "must have an even number of rows")
            halves = _Halves(tensor)
            return tensor.rename(name, shape).with_decoder(halves, tensor.dtype, shape)
    return tensor.rename(name, shape)


def _build_error(tensor: SourceTensor, problem: str) -> FormatError:
    return FormatError(f"{tensor.path}: {tensor.name[:200]} {list(tensor.shape)} {problem}")


@dataclass(frozen=True, slots=True)
class _ChannelsFirst:
    """A convolution of ``shape`` [out, in, height, width] with its channels last in the file."""

    file_range: FileRange
    dtype: str
    shape: tuple[int, ...]

    def decode(self, start: int, stop: int) -> Iterator[bytes]:
        _, channels, height, width = self.shape
        row = self.file_range.nbytes // self.shape[0] if self.shape[0] else 0
        step = max(1, _CHUNK_SIZE // max(1, row))
        for row_start in range(start, stop, step):
            data = read_rows(self.file_range, row, row_start, min(row_start + step, stop))
            yield transpose(data, self.dtype, height * width, channels)


@dataclass(frozen=True, slots=True)
class _Halves:
    """A tensor with the halves of its rows exchanged in the file."""

    tensor: SourceTensor

    def decode(self, start: int, stop: int) -> Iterator[bytes]:
        count = self.tensor.shape[0]
        row = self.tensor.nbytes // count
        step = max(1, _CHUNK_SIZE // max(1, row))
        while start < stop:
            source_row = (start + count // 2) % count
            size = min(step, stop - start, count - source_row)
            yield read_rows(self.tensor.file_range, row, source_row, source_row + size)
            start += size


def read_rows(file_range: FileRange, row: int, start: int, stop: int) -> bytes:
    """Return rows of ``row`` bytes; fewer if the file was truncated. Raises OSError."""
    if file_range.decoded is not None:
        rows = DecodedRows(
            file_range.decoded.decoder,
            file_range.decoded.start + start,
            file_range.decoded.start + stop,
        )
        return b"".join(map(bytes, rows.iter_bytes()))
    with file_range.path.open("rb") as file:
        file.seek(file_range.offset + start * row)
        return file.read((stop - start) * row)

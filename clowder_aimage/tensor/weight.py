"""Weights: the logical tensors of a model, each made of one or more tensors in files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from clowder_aimage.tensor import Header, Quantization, compute_nbytes

# Dtypes that can be cast and quantized.
FLOATS = ("F64", "F32", "F16", "BF16")


class TensorDecoder(Protocol):
    """A tensor that is computed from the bytes of a file, such as a dequantized one."""

    def decode(self, start: int, stop: int, /) -> Iterator[bytes | memoryview]:
        """Yield the bytes of rows ``start`` to ``stop`` (of the first dimension), in order.

        They are little-endian values of the tensor's dtype, in chunks of a few MiB at most.
        """
        ...


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Rows ``start`` to ``stop`` of a decoder's tensor."""

    decoder: TensorDecoder
    start: int
    stop: int

    def iter_bytes(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes in order."""
        return self.decoder.decode(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of ``nbytes`` bytes at ``offset`` of a file modified at ``modified`` (ns).

    It is None for a blob of a store: that never changes, but FUSE may set its time later. With
    ``decoded``, the bytes are computed from the file instead.
    """

    path: Path
    offset: int
    nbytes: int
    modified: int | None
    decoded: DecodedRows | None = None


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor in a file: ``nbytes`` bytes at ``offset``, both in bytes, from the file's start.

    ``modified`` is as in a FileRange. With ``decoded``, its bytes are computed from the file;
    ``nbytes`` is then their number, and ``offset`` has no meaning.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    modified: int | None
    decoded: DecodedRows | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        header: Header,
        names: Iterable[str] | None = None,
        *,
        is_blob: bool = False,
    ) -> list[SourceTensor]:
        """Return the tensors named in ``names``, or all, of the file at ``path``, in order."""
        modified = None if is_blob else path.stat().st_mtime_ns
        entries = [(name, header.tensors[name]) for name in names or header.tensors]
        return [
            cls(
                name,
                info.dtype,
                info.shape,
                path,
                header.data_offset + info.start,
                info.nbytes,
                modified,
            )
            for name, info in entries
        ]

    @property
    def file_range(self) -> FileRange:
        return FileRange(self.path, self.offset, self.nbytes, self.modified, self.decoded)

    def with_decoder(
        self, decoder: TensorDecoder, dtype: str, shape: tuple[int, ...]
    ) -> SourceTensor:
        """Return the tensor of this name that ``decoder`` computes."""
        rows = DecodedRows(decoder, 0, shape[0] if shape else 1)
        size = compute_nbytes(dtype, shape)
        return replace(self, dtype=dtype, shape=shape, nbytes=size, decoded=rows)

    def rename(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        """Return the same values with another name, in a shape of as many elements."""
        return replace(self, name=name, shape=shape)

    def slice_rows(self, name: str, start: int, stop: int) -> SourceTensor:
        """Return rows of the first dimension as a tensor called ``name``."""
        row = self.nbytes // self.shape[0]
        tensor = replace(
            self,
            name=name,
            shape=(stop - start, *self.shape[1:]),
            offset=self.offset + start * row,
            nbytes=(stop - start) * row,
        )
        if self.decoded is None:
            return tensor
        base = self.decoded.start
        return replace(tensor, decoded=replace(self.decoded, start=base + start, stop=base + stop))


class WeightReader(Enum):
    """The conversion of a chunk's bytes to those of the blob."""

    AS_IS = "as they are"
    FACTOR = "as a float32 factor"
    DIVISOR = "as the float32 reciprocal of the divisor that they are"


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A stored tensor of a weight: its suffix in the blob ("", ".scale", ...), dtype and shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    tensor: SourceTensor
    reading: WeightReader = WeightReader.AS_IS


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a network; ``dtype`` is a safetensors dtype or the name of a quantization."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorChunk, ...]
    quantization: Quantization | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def tensor(self) -> SourceTensor:
        """Return the source tensor, or that of the codes."""
        return self.parts[0].tensor

    @property
    def nbytes(self) -> int:
        """Return the size in the source, in bytes."""
        return sum(chunk.tensor.nbytes for chunk in self.parts)


def to_weight(tensor: SourceTensor) -> Weight:
    """Return a tensor as an unquantized weight."""
    chunk = TensorChunk("", tensor.dtype, tensor.shape, tensor)
    return Weight(tensor.name, tensor.dtype, tensor.shape, (chunk,))


def sort_weights(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Return the weights sorted by name."""
    return tuple(sorted(weights, key=lambda weight: weight.name))

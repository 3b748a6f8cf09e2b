"""Weights: the logical tensors of a model, each made of one or more tensors in files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clowder_aimage.tensor import Header, Quantization

FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes that can be cast and quantized


@dataclass(frozen=True, slots=True)
class FileSpan:
    """``nbytes`` bytes at ``offset`` of a file with the modification time ``modified`` (ns)."""

    path: Path
    offset: int
    nbytes: int
    modified: int


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor in a file: ``nbytes`` bytes at ``offset``, both in bytes, from the file's start.

    ``modified`` is the modification time of the file in nanoseconds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    modified: int

    @classmethod
    def of(
        cls, path: Path, header: Header, names: Iterable[str] | None = None
    ) -> list[SourceTensor]:
        """Return the tensors named in ``names``, or all, of the file at ``path``, in order."""
        modified = path.stat().st_mtime_ns
        found = [(name, header.tensors[name]) for name in names or header.tensors]
        return [
            cls(name, i.dtype, i.shape, path, header.data_offset + i.start, i.nbytes, modified)
            for name, i in found
        ]

    @property
    def span(self) -> FileSpan:
        return FileSpan(self.path, self.offset, self.nbytes, self.modified)


class WeightReader(Enum):
    """The conversion of a part's bytes to those of the blob."""

    AS_IS = "as they are"
    FACTOR = "as a float32 factor"
    DIVISOR = "as the float32 reciprocal of the divisor that they are"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a weight: its suffix in the blob ("", ".scale", ...), dtype and shape."""

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
    parts: tuple[TensorPart, ...]
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
        return sum(part.tensor.nbytes for part in self.parts)


def plain(tensor: SourceTensor) -> Weight:
    """Return a tensor as an unquantized weight."""
    part = TensorPart("", tensor.dtype, tensor.shape, tensor)
    return Weight(tensor.name, tensor.dtype, tensor.shape, (part,))


def by_name(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Return the weights sorted by name."""
    return tuple(sorted(weights, key=lambda weight: weight.name))

"""Tensors of one weight file in any format, under the names that the file has for them.

Layouts of whole models (``image_layout.py``) are read through this module. Values that are stored
as something else (quantized files, GGUF) are tensors with a decoder: ``SourceTensor.decoding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.formats.shard_index import read_file
from clowder_aimage.tensor.weight import SourceTensor


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A file, its tensors in the order of the file, and its metadata.

    ``is_exact`` is set if the tensors' bytes are those of the file, so that it can be given back.
    """

    path: Path
    tensors: tuple[SourceTensor, ...]
    metadata: Mapping[str, str]
    is_exact: bool = True


def read_source(path: Path) -> WeightSource:
    """Return the tensors of a file. Raises FormatError: It is damaged."""
    header = read_file(path)
    return WeightSource(path, tuple(SourceTensor.of(path, header)), header.metadata)

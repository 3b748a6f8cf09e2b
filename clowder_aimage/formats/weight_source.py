"""Tensors of one weight file in any format, under the names of the file.

Layouts of image models (``family_weights.py``) are read through this module. Quantized tensors and
those of GGUF have a decoder: ``SourceTensor.decoding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clowder_aimage.formats import gguf_header, model_tree
from clowder_aimage.formats.codes.coded_tensor import DecodedCount
from clowder_aimage.formats.codes.comfy_quant import decode_quantized
from clowder_aimage.formats.codes.gguf_weights import read_gguf
from clowder_aimage.formats.shard_index import read_file
from clowder_aimage.tensor.weight import SourceTensor

# Extensions of weight files in a directory.
ENDINGS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A file, its tensors in the order of the file, and its metadata.

    ``is_exact`` is True if an export can restore the file: no tensor is decoded. ``decoded`` is
    the number of decoded tensors, by format and dtype of the values.
    """

    path: Path
    tensors: tuple[SourceTensor, ...]
    metadata: Mapping[str, str]
    is_exact: bool = True
    decoded: DecodedCount = field(default_factory=dict)


def read_source(path: Path) -> WeightSource:
    """Return the tensors of a file; quantized ones are decoded.

    Raises:
        FormatError: It is damaged, or its quantization is unsupported.
        UsageError: A package for decoding is not installed.
    """
    if model_tree.read_start(path).startswith(gguf_header.MAGIC):
        tensors, metadata, decoded = read_gguf(path)
        return WeightSource(path, tensors, metadata, False, decoded)
    header = read_file(path)
    stored = tuple(SourceTensor.of(path, header))
    tensors, decoded = decode_quantized(path, stored, header.metadata)
    return WeightSource(path, tensors, header.metadata, not decoded, decoded)

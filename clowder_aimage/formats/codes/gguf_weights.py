"""Tensors of GGUF files, quantized ones decoded to float32.

Dimensions are in the order of other formats: rows first, their length last. ComfyUI-GGUF joins
rows to make whole blocks, and states the shape in ``comfy.gguf.orig_shape.NAME``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.codes.coded_tensor import (
    GGUF_TYPES,
    CodedTensor,
    DecodedCount,
    check_package,
)
from clowder_aimage.formats.gguf import read_model
from clowder_aimage.formats.gguf_header import SHAPES, TENSORS, GgufTensor
from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.tensor.weight import SourceTensor

# Types of values, with the same names in safetensors.
_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")
# The suffix of matrices with one row; stable-diffusion.cpp writes them as vectors.
_ROW = "_pad_token"
_BLOCKS = {name: (block, size) for name, block, size in TENSORS.values()}


def read_gguf(path: Path) -> tuple[tuple[SourceTensor, ...], Mapping[str, str], DecodedCount]:
    """Return the tensors of a model, its text metadata, and the count of decoded tensors.

    Raises:
        FormatError: A file is damaged, or a tensor has a type that cannot be decoded.
        UsageError: A required package is not installed.
    """
    model = read_model(path)
    metadata: dict[str, Any] = {}
    for header in model.headers:
        metadata |= header.metadata
    count: Counter[tuple[str, str]] = Counter()
    tensors = []
    for file, header in zip(model.files, model.headers, strict=True):
        for tensor in header.tensors:
            shape = _resolve_shape(path, tensor, metadata)
            if tensor.type not in _PLAIN:
                count[tensor.type, "F32"] += 1
            tensors.append(_build_tensor(file, tensor, shape))
    texts = {key: value for key, value in metadata.items() if isinstance(value, str)}
    return tuple(tensors), texts, count


def _resolve_shape(path: Path, tensor: GgufTensor, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    stated: tuple[int, ...] | None = metadata.get(SHAPES + tensor.name)
    if stated is None:
        rows = (1,) if tensor.name.endswith(_ROW) and len(tensor.shape) == 1 else ()
        return (*rows, *reversed(tensor.shape))
    if any(size < 1 for size in stated) or math.prod(stated) != tensor.elements:
        raise FormatError(
            f"{path}: {tensor.name} has {tensor.elements} values, which are not of the shape "
            f"{list(stated)} that its metadata state"
        )
    return stated


def _build_tensor(file: SourceFile, tensor: GgufTensor, shape: tuple[int, ...]) -> SourceTensor:
    location = (file.path, tensor.offset, tensor.nbytes, file.modified)
    if tensor.type in _PLAIN:
        return SourceTensor(tensor.name, tensor.type, shape, *location)
    if tensor.type not in GGUF_TYPES:
        raise FormatError(
            f"{file.path}: {tensor.name} has the type {tensor.type}, which cannot be decoded",
            hint=f"supported: {', '.join(GGUF_TYPES)}; the file can be kept as it is",
        )
    check_package("gguf")
    codes = SourceTensor(tensor.name, "U8", (tensor.nbytes,), *location)
    return CodedTensor(codes, tensor.type, "F32", shape, *_BLOCKS[tensor.type]).build_tensor(
        tensor.name
    )

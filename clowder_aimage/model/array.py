"""Tensors as MLX arrays, a few at a time.

``mx.load`` keeps a blob's file open until its arrays are evaluated, and a process may be limited to
256 open files. So tensors are loaded in chunks of at most 16 blobs, and cast or dequantized: the
peak is the kept arrays plus at most 192 MiB of stored bytes, or one larger tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.model.backend import mx
from clowder_aimage.model.quantized import QuantizedArray
from clowder_aimage.model.stored_tensor import StoredTensor, TensorRange
from clowder_aimage.tensor.blob import BIAS, GLOBAL_SCALE, SCALE

CHUNK_BLOBS = 16
CHUNK_BYTES = 64 * 1024 * 1024
PENDING_BYTES = 3 * CHUNK_BYTES
# MLX reads this number of chunks ahead
_PENDING = 8
Value = mx.array | QuantizedArray
_TYPES = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "C64")


def read_arrays(
    tensors: Iterable[StoredTensor], dtype: mx.Dtype | None, *, keep_quantized: bool
) -> Iterator[tuple[StoredTensor, Value]]:
    """Yield the tensors with their values, evaluated.

    Floats become ``dtype``, or stay unchanged with None. Quantized ones stay codes with
    ``keep_quantized``, with affine scales in ``dtype``, and are otherwise dequantized to it.

    Raises:
        ModelError: MLX does not support the type, or cannot load a blob.
    """
    pending: deque[_Pending] = deque()
    for chunk in _iter_chunks(tensors):
        size = sum(tensor.nbytes for tensor in chunk)
        while pending and size + sum(before for before, _ in pending) > PENDING_BYTES:
            yield from _evaluate(pending)
        files = _open(chunk)
        values = [(tensor, _build_value(tensor, files, dtype, keep_quantized)) for tensor in chunk]
        # MLX reads in its threads while the next headers are opened
        mx.async_eval(_list_arrays(values))  # type: ignore[no-untyped-call]
        pending.append((size, values))
        if len(pending) > _PENDING:
            yield from _evaluate(pending)
    while pending:
        yield from _evaluate(pending)


# The stored bytes of a chunk, and its arrays
_Pending = tuple[int, list[tuple[StoredTensor, Value]]]


def _evaluate(pending: deque[_Pending]) -> list[tuple[StoredTensor, Value]]:
    """Return the oldest chunk, evaluated; memory freed by its casts is returned to the system."""
    _, chunk = pending.popleft()
    try:
        mx.eval(_list_arrays(chunk))
    except RuntimeError as error:
        raise ModelError(f"the weights cannot be loaded: {error}") from error
    if mx.get_cache_memory() > PENDING_BYTES:
        mx.clear_cache()
    return chunk


def _list_arrays(chunk: list[tuple[StoredTensor, Value]]) -> list[mx.array]:
    parts = (v.parts.values() if isinstance(v, QuantizedArray) else [v] for _, v in chunk)
    return list(chain.from_iterable(parts))


def _iter_chunks(tensors: Iterable[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Yield lists of as many tensors as fit in a chunk, at least one."""
    chunk: list[StoredTensor] = []
    paths: set[str] = set()
    size = 0
    for tensor in tensors:
        blob_paths = {tensor_range.path for tensor_range in tensor.ranges}
        nbytes = tensor.nbytes
        if chunk and (len(paths | blob_paths) > CHUNK_BLOBS or size + nbytes > CHUNK_BYTES):
            yield chunk
            chunk, paths, size = [], set(), 0
        chunk.append(tensor)
        paths |= blob_paths
        size += nbytes
    if chunk:
        yield chunk


Files = dict[str, dict[str, mx.array]]


def _open(chunk: list[StoredTensor]) -> Files:
    """Return the arrays of every file in the chunk, by path and key; each is opened once."""
    files: Files = {}
    for tensor in chunk:
        for tensor_range in tensor.ranges:
            # MLX would return bytes for an 8-bit float
            if tensor_range.dtype not in _TYPES:
                raise ModelError(
                    f"{tensor.name}: weights of type {tensor_range.dtype} are not supported"
                )
            if tensor_range.path in files:
                continue
            try:
                loaded: Any = mx.load(tensor_range.path, format="safetensors")
            except RuntimeError as error:
                raise ModelError(f"{tensor.name}: cannot be loaded: {error}") from error
            files[tensor_range.path] = loaded
    return files


def _build_value(
    tensor: StoredTensor, files: Files, dtype: mx.Dtype | None, keep_quantized: bool
) -> Value:
    def get_array(tensor_range: TensorRange) -> mx.array:
        return files[tensor_range.path][tensor_range.key]

    value = get_array(tensor.values)
    if tensor.quantization is None:
        if dtype is not None and mx.issubdtype(value.dtype, mx.floating):
            return value.astype(dtype)
        return value
    parts = {suffix: get_array(tensor_range) for suffix, tensor_range in tensor.parts.items()}
    quantized = QuantizedArray(
        tensor.quantization, value, parts[SCALE], parts.get(BIAS), parts.get(GLOBAL_SCALE)
    )
    return quantized.cast(dtype) if keep_quantized else quantized.dequantize(dtype)

"""Tensors for other runtimes: numpy and torch arrays over the blobs, without MLX.

Values lie in the file's pages until they are touched, and processes on one machine share them.
Only what the library has no type for is copied: BF16 and the 8-bit floats become float32 in numpy;
quantized tensors are dequantized to float32 in both.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError, StoreError
from clowder_aimage.model.dequantize import dequantize, e4m3, e5m2, e8m0
from clowder_aimage.model.mapped_file import map_file
from clowder_aimage.model.stored_tensor import StoredTensor, TensorSpan
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.tensor_blob import BIAS, GLOBAL_SCALE, SCALE

Array = npt.NDArray[Any]
_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}
_DECODED = {"F8_E4M3": e4m3, "F8_E5M2": e5m2, "F8_E8M0": e8m0}
_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


def numpy_tensor(tensor: StoredTensor) -> Array:
    """Return the values, read-only: a view of the blob, or float32 if numpy lacks the type.

    Raises:
        ModelError: for a type that cannot be shown at all.
        StoreError: the blob cannot be opened.
    """
    if tensor.quantization is None:
        return numpy_span(tensor.values)
    values = _dequantized(tensor, tensor.quantization)
    values.flags.writeable = False
    return values


def _dequantized(tensor: StoredTensor, quantization: Quantization) -> Array:
    parts = {part: numpy_span(span) for part, span in tensor.parts.items()}
    return dequantize(
        quantization,
        numpy_span(tensor.values),
        _single(parts[SCALE]),
        _single(parts[BIAS]) if BIAS in parts else None,
        parts.get(GLOBAL_SCALE),
    )


def numpy_span(span: TensorSpan) -> Array:
    """One array as it is stored, read-only. Raises as ``numpy_tensor`` does."""
    if span.dtype in _NUMPY:
        return _view(span, _NUMPY[span.dtype])
    if span.dtype == "BF16":
        values = np.asarray(_view(span, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif span.dtype in _DECODED:
        values = np.asarray(_DECODED[span.dtype](_view(span, "u1")))  # one value alone is no array
    else:
        raise ModelError(f"{span.key}: numpy cannot show values of type {span.dtype}")
    values.flags.writeable = False
    return values


def torch_tensor(tensor: StoredTensor) -> Any:
    """Return the values as a ``torch.Tensor`` on the CPU; writes to it stay in this process.

    Raises:
        ModelError: PyTorch is not there, or has no such type; and as ``numpy_tensor`` does.
    """
    torch = _torch()
    if tensor.quantization is not None:
        return torch.from_numpy(_dequantized(tensor, tensor.quantization))
    span = tensor.values
    dtype = getattr(torch, _TORCH.get(span.dtype, ""), None)
    if dtype is None:
        raise ModelError(f"{span.key}: this PyTorch cannot show values of type {span.dtype}")
    if not span.nbytes:
        return torch.empty(span.shape, dtype=dtype)
    buffer = _mapped(span)
    if span.start % dtype.itemsize:  # a header that is not padded: torch wants whole words
        buffer, start = bytearray(buffer[span.start : span.start + span.nbytes]), 0
    else:
        start = span.start
    count = span.nbytes // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).reshape(span.shape)


def _view(span: TensorSpan, dtype: str) -> Array:
    if not span.nbytes:
        values = np.empty(span.shape, dtype)
    else:
        count = span.nbytes // np.dtype(dtype).itemsize
        flat = np.frombuffer(_mapped(span), dtype, count, span.start)
        values = flat.reshape(span.shape)
    values.flags.writeable = False
    return values


def _mapped(span: TensorSpan) -> Any:
    """Return the file of the array."""
    buffer = map_file(span.path)
    if len(buffer) < span.start + span.nbytes:
        raise StoreError(f"{span.path} has become shorter since its header was read")
    return buffer


def _single(values: Array) -> Array:
    """Scales as bytes, or as float32, which holds all of their types exactly."""
    return values if values.dtype == np.uint8 else values.astype(np.float32)


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ModelError(
            "PyTorch is not installed", hint="install torch, or take the tensors as numpy arrays"
        ) from None

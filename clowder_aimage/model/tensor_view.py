"""Tensors for other runtimes: numpy and torch arrays over the blobs, without MLX.

Arrays are views of the file's pages, which processes share; safetensors makes those of torch. Only
types that the library does not support are copied: BF16 and 8-bit floats to float32 in numpy,
quantized tensors in both.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError, StoreError
from clowder_aimage.model.dequantize import dequantize
from clowder_aimage.model.stored_tensor import StoredTensor, TensorSpan
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.float_code import e4m3, e5m2, e8m0

Array = npt.NDArray[Any]
_FAILED = ctypes.c_void_p(-1).value
_NUMPY = {"BOOL": "?", "U8": "u1", "I8": "i1", "C64": "<c8"}
_NUMPY |= {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "UIF" for size in (2, 4, 8)}
_DECODED = {"F8_E4M3": e4m3, "F8_E5M2": e5m2, "F8_E8M0": e8m0}


def numpy_tensor(tensor: StoredTensor) -> Array:
    """Return the values, read-only: a view of the blob, or float32 if numpy lacks the type.

    Raises:
        ModelError: The type is unsupported.
        StoreError: The blob cannot be opened.
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
    """Return one array as stored, read-only. Raises as ``numpy_tensor`` does."""
    if span.dtype in _NUMPY:
        return _view(span, _NUMPY[span.dtype])
    if span.dtype == "BF16":
        values = np.asarray(_view(span, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif span.dtype in _DECODED:
        values = np.asarray(_DECODED[span.dtype](_view(span, "u1")))  # a scalar is not an array
    else:
        raise ModelError(f"{span.key}: numpy does not support {span.dtype}")
    values.flags.writeable = False
    return values


def torch_tensor(tensor: StoredTensor) -> Any:
    """Return the values as a ``torch.Tensor`` on the CPU; writes to it stay in this process.

    Raises:
        ModelError: PyTorch is not installed or lacks the type; and as ``numpy_tensor`` does.
    """
    try:
        torch = importlib.import_module("torch")
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise ModelError(
            "PyTorch is not installed", hint="install torch, or read the tensors as numpy arrays"
        ) from None
    if tensor.quantization is not None:
        return torch.from_numpy(_dequantized(tensor, tensor.quantization))
    span = tensor.values
    try:
        with safetensors.safe_open(span.path, framework="pt") as file:
            values = file.get_tensor(span.key)
    except OSError as error:
        raise StoreError(f"{span.path} cannot be mapped: {error.strerror or error}") from None
    except (AttributeError, safetensors.SafetensorError) as error:  # also of a truncated file
        raise ModelError(f"{span.key}: PyTorch cannot read {span.dtype}: {error}") from None
    is_aligned = values.data_ptr() % values.element_size() == 0  # a header may have no padding
    return values if is_aligned else values.clone()


def _view(span: TensorSpan, dtype: str) -> Array:
    count = span.nbytes // np.dtype(dtype).itemsize
    flat = np.frombuffer(_mapped(span), dtype, count, span.start) if count else np.empty(0, dtype)
    values = flat.reshape(span.shape)
    values.flags.writeable = False
    return values


def _mapped(span: TensorSpan) -> Any:
    buffer = map_file(span.path)
    if len(buffer) < span.start + span.nbytes:
        raise StoreError(f"{span.path} was truncated after its header was read")
    return buffer


def _single(values: Array) -> Array:
    """Return scales as bytes, or as float32, which represents all of their types exactly."""
    return values if values.dtype == np.uint8 else values.astype(np.float32)


def map_file(path: str) -> Any:
    """Map the whole file as a writable buffer, until it is no longer referenced.

    The pages are private: writes change neither the file nor other mappings. Python's ``mmap``
    keeps a descriptor open (up to 3.12), and a model may have more tensors than a process may
    have open files.

    Raises:
        StoreError: It cannot be opened or mapped, or is empty.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(handle).st_size
            address = _map(handle, size)
        finally:
            os.close(handle)
    except OSError as error:
        raise StoreError(f"{path} cannot be mapped: {error.strerror or error}") from None
    buffer = (ctypes.c_char * size).from_address(address)
    unmapping = weakref.finalize(buffer, _library().munmap, address, size)
    unmapping.atexit = False  # at exit the buffer may still be in use
    return buffer


def _map(handle: int, size: int) -> int:
    address = _library().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, handle, 0
    )
    if address in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_longlong,  # off_t, on every 64-bit system
    )
    library.munmap.restype = ctypes.c_int
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library

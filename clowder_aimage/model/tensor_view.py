"""Tensors for other runtimes: numpy and torch arrays over the blobs, without MLX.

Arrays are views of the file's pages, shared by processes; safetensors makes those of torch. Only
types that the library does not support are copied: BF16 and 8-bit floats to float32 in numpy,
quantized tensors in both.
"""

from __future__ import annotations

import ctypes
import errno
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
from clowder_aimage.model.stored_tensor import StoredTensor, TensorRange
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.float_code import decode_e4m3, decode_e5m2, decode_e8m0

Array = npt.NDArray[Any]
# Of FUSE with direct I/O, and of 9p without a cache
_NO_MAPPINGS = {errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP}
_FAILED = ctypes.c_void_p(-1).value
_NUMPY = {"BOOL": "?", "U8": "u1", "I8": "i1", "C64": "<c8"}
_NUMPY |= {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "UIF" for size in (2, 4, 8)}
_DECODED = {"F8_E4M3": decode_e4m3, "F8_E5M2": decode_e5m2, "F8_E8M0": decode_e8m0}


def read_numpy_tensor(tensor: StoredTensor) -> Array:
    """Return the values, read-only: a view of the blob, or float32 if numpy lacks the type.

    Raises:
        ModelError: The type is unsupported.
        StoreError: The blob cannot be opened.
    """
    if tensor.quantization is None:
        return read_numpy_range(tensor.values)
    values = _dequantize(tensor, tensor.quantization)
    values.flags.writeable = False
    return values


def _dequantize(tensor: StoredTensor, quantization: Quantization) -> Array:
    parts = {
        suffix: read_numpy_range(tensor_range) for suffix, tensor_range in tensor.parts.items()
    }
    return dequantize(
        quantization,
        read_numpy_range(tensor.values),
        _widen_scales(parts[SCALE]),
        _widen_scales(parts[BIAS]) if BIAS in parts else None,
        parts.get(GLOBAL_SCALE),
    )


def read_numpy_range(tensor_range: TensorRange) -> Array:
    """Return one array as stored, read-only. Raises as ``read_numpy_tensor`` does."""
    if tensor_range.dtype in _NUMPY:
        return _view_range(tensor_range, _NUMPY[tensor_range.dtype])
    if tensor_range.dtype == "BF16":
        values = np.asarray(_view_range(tensor_range, "<u2").astype(np.uint32) << 16).view(
            np.float32
        )
    elif tensor_range.dtype in _DECODED:
        values = np.asarray(
            _DECODED[tensor_range.dtype](_view_range(tensor_range, "u1"))
            # A scalar is not an array
        )
    else:
        raise ModelError(f"{tensor_range.key}: numpy does not support {tensor_range.dtype}")
    values.flags.writeable = False
    return values


def read_torch_tensor(tensor: StoredTensor) -> Any:
    """Return the values as a ``torch.Tensor`` on the CPU; writes to it stay in this process.

    Raises:
        ModelError: PyTorch is not installed or lacks the type; and as ``read_numpy_tensor`` does.
    """
    try:
        torch = importlib.import_module("torch")
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise ModelError(
            "PyTorch is not installed", hint="install torch, or read the tensors as numpy arrays"
        ) from None
    if tensor.quantization is not None:
        return torch.from_numpy(_dequantize(tensor, tensor.quantization))
    tensor_range = tensor.values
    try:
        with safetensors.safe_open(tensor_range.path, framework="pt") as file:
            values = file.get_tensor(tensor_range.key)
    except OSError as error:
        raise StoreError(
            f"{tensor_range.path} cannot be mapped: {error.strerror or error}"
        ) from None
    except (AttributeError, safetensors.SafetensorError) as error:
        # SafetensorError is also raised for a truncated file
        raise ModelError(
            f"{tensor_range.key}: PyTorch cannot read {tensor_range.dtype}: {error}"
        ) from None
    # torch requires alignment, but a header may have no padding
    is_aligned = values.data_ptr() % values.element_size() == 0
    return values if is_aligned else values.clone()


def _view_range(tensor_range: TensorRange, dtype: str) -> Array:
    count = tensor_range.nbytes // np.dtype(dtype).itemsize
    flat = (
        np.frombuffer(_map_range(tensor_range), dtype, count, tensor_range.start)
        if count
        else np.empty(0, dtype)
    )
    values = flat.reshape(tensor_range.shape)
    values.flags.writeable = False
    return values


def _map_range(tensor_range: TensorRange) -> Any:
    buffer = map_file(tensor_range.path)
    if len(buffer) < tensor_range.start + tensor_range.nbytes:
        raise StoreError(f"{tensor_range.path} was truncated after its header was read")
    return buffer


def _widen_scales(values: Array) -> Array:
    """Return scales as bytes, or as float32, exact for all of their types."""
    return values if values.dtype == np.uint8 else values.astype(np.float32)


def map_file(path: str) -> Any:
    """Map the whole file as a writable buffer, until it is no longer referenced.

    On a file system without mappings the buffer is a copy.

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
            address = _map_or_read(handle, size)
        finally:
            os.close(handle)
    except OSError as error:
        raise StoreError(f"{path} cannot be mapped: {error.strerror or error}") from None
    buffer = (ctypes.c_char * size).from_address(address)
    unmapping = weakref.finalize(buffer, _load_libc().munmap, address, size)
    # At exit the buffer may still be in use
    unmapping.atexit = False
    return buffer


def _map_or_read(handle: int, size: int) -> int:
    """Return the address of the bytes of a file; they are read if it cannot be mapped."""
    try:
        return _map(handle, size, mmap.MAP_PRIVATE)
    except OSError as error:
        if error.errno not in _NO_MAPPINGS:
            raise
    address = _map(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    offset = 0
    while count := os.preadv(handle, [view[offset:]], offset):
        offset += count
    return address


def _map(handle: int, size: int, flags: int) -> int:
    address = _load_libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, 0)
    if address in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


@functools.cache
def _load_libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        # off_t, on every 64-bit system
        ctypes.c_longlong,
    )
    library.munmap.restype = ctypes.c_int
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library

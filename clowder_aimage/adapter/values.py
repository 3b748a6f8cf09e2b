"""Values of an adapter's tensors, from an open safetensors file, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from clowder_aimage.adapter.adapter import Floats
from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import Header
from clowder_aimage.tensor.float_code import decode_e4m3, decode_e5m2

_AGAIN = "download the file again"
# BF16 and float8 are read as unsigned integers, since numpy lacks them.
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
}
# Types of alphas, flags and shapes only.
_COUNTS = ("I64", "I32", "I16", "I8", "U8", "BOOL")


@dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """Stored values of a safetensors ``dtype``: numpy lacks some of the types."""

    dtype: str
    codes: npt.NDArray[Any]

    def __getitem__(self, key: Any) -> StoredArray:
        return StoredArray(self.dtype, self.codes[key])

    def equals(self, other: StoredArray) -> bool:
        """Return True if type, shape and all bits are equal."""
        is_like = self.dtype == other.dtype and self.codes.shape == other.codes.shape
        return is_like and self.codes.tobytes() == other.codes.tobytes()

    def multiply(self, factor: float) -> StoredArray:
        """Return the values times a number, in float32."""
        return StoredArray("F32", self.to_float32() * np.float32(factor))

    @staticmethod
    def promote(arrays: Sequence[StoredArray]) -> list[StoredArray]:
        """Return arrays of the same type: their type, or float32 if they differ."""
        if len({array.dtype for array in arrays}) == 1:
            return list(arrays)
        return [StoredArray("F32", array.to_float32()) for array in arrays]

    @classmethod
    def concatenate(cls, arrays: Sequence[StoredArray]) -> StoredArray:
        """Return the rows of all arrays."""
        promoted = cls.promote(arrays)
        return cls(promoted[0].dtype, np.concatenate([array.codes for array in promoted]))

    def to_float32(self) -> Floats:
        """Return the values in float32."""
        return _decode(self.codes.tobytes(), self.dtype).reshape(self.codes.shape)


@dataclass(frozen=True, slots=True)
class AdapterValues:
    """The tensors of an open file as float32 arrays."""

    label: str
    file: BinaryIO
    header: Header

    def read_array(self, name: str, ndim: int | None = 2) -> Floats:
        """Return a tensor; the last dimensions are removed until it has ``ndim``, if they are 1."""
        info = self.header.tensors[name]
        if info.dtype not in _TYPES or info.dtype in _COUNTS:
            raise FormatError(
                f"{self.label}: {name[:200]} has the type {info.dtype}, which cannot be read",
                hint="save the adapter in float32, float16 or bfloat16",
            )
        values = _decode(self._read(name), info.dtype).reshape(info.shape)
        while ndim is not None and values.ndim > ndim and values.shape[-1] == 1:
            values = values[..., 0]
        if not np.isfinite(values).all():
            raise FormatError(
                f"{self.label}: {name[:200]} has values that are not finite (NaN or infinity)",
                hint=f"{_AGAIN}; if it stays, its training failed",
            )
        return values

    def read_stored(self, name: str, shape: tuple[int, ...]) -> StoredArray:
        """Return a tensor in its type, in a shape with the same number of values."""
        dtype = self.header.tensors[name].dtype
        codes = np.frombuffer(self._read(name), _TYPES[dtype])
        return StoredArray(dtype, codes.reshape(shape))

    def read_number(self, name: str) -> float:
        """Return the value of a tensor with one element."""
        info = self.header.tensors[name]
        if math.prod(info.shape) != 1 or info.dtype not in _TYPES:
            raise FormatError(
                f"{self.label}: {name[:200]} is not a number, but {info.dtype} {list(info.shape)}"
            )
        value = float(_decode(self._read(name), info.dtype).reshape(-1)[0])
        if not math.isfinite(value):
            raise FormatError(f"{self.label}: {name[:200]} is not finite: {value}", hint=_AGAIN)
        return value

    def read_integers(self, name: str) -> tuple[int, ...]:
        """Return the values of a short list of integers."""
        info = self.header.tensors[name]
        if math.prod(info.shape) <= 8 and info.dtype in _TYPES:
            values = _decode(self._read(name), info.dtype).reshape(-1)
            if np.isfinite(values).all():
                return tuple(map(int, values))
        raise FormatError(f"{self.label}: {name[:200]} is not a list of dimensions", hint=_AGAIN)

    def _read(self, name: str) -> bytes:
        info = self.header.tensors[name]
        self.file.seek(self.header.data_offset + info.start)
        data = self.file.read(info.nbytes)
        if len(data) < info.nbytes:
            raise FormatError(f"{self.label} was truncated while it was read", hint=_AGAIN)
        return data


def _decode(data: bytes, dtype: str) -> Floats:
    values = np.frombuffer(data, _TYPES[dtype])
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":
        return decode_e5m2(values)
    if dtype == "F8_E4M3":
        return decode_e4m3(values)
    # float64 may overflow; infinities are rejected by the caller.
    with np.errstate(over="ignore"):
        return values.astype(np.float32)

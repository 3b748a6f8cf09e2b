"""Locations of tensors in blobs, from headers checked against layers; independent of MLX."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import Layer
from clowder_aimage.errors import FormatError, StoreError
from clowder_aimage.formats.stored_weights import name_layer
from clowder_aimage.oci import Descriptor
from clowder_aimage.tensor import (
    DTYPE_BITS,
    BlobTensor,
    Header,
    Quantization,
    compute_nbytes,
    encode_header,
    parse_header,
    read_header,
)
from clowder_aimage.tensor.blob import CODES

# Bytes: contains the header of nearly every blob
_FIRST = 4096
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One array: ``key`` in the header of the file ``path``, ``nbytes`` bytes from ``start``."""

    path: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its ``name`` without the component.

    ``dtype`` is a safetensors dtype or the name of the quantization, ``shape`` that of the
    dequantized tensor. ``values`` are its values or codes, ``parts`` the SCALE, BIAS and
    GLOBAL_SCALE of codes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: TensorRange
    quantization: Quantization | None = None
    parts: Mapping[str, TensorRange] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[TensorRange, ...]:
        return (self.values, *self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor_range.nbytes for tensor_range in self.ranges)


@dataclass(frozen=True, slots=True)
class WeightBlob:
    """A layer's file and the header in it."""

    layer: Layer
    path: str
    header: Header

    @classmethod
    def read(cls, store: BlobFiles, layer: Layer) -> WeightBlob:
        """Read and check the header.

        Raises:
            FormatError: The blob is not a safetensors file, or does not match its descriptor.
            AccessError: It is not in the store, or cannot be read.
        """
        path = os.fspath(store.find_path(layer.descriptor))
        try:
            return cls(layer, path, _read_header(path, layer.descriptor))
        except FormatError as error:
            raise name_layer(layer, error) from None
        except OSError as error:
            raise StoreError(f"{layer.name}: cannot be read: {error.strerror or error}") from None

    def get_range(self, key: str) -> TensorRange:
        """Return the location of the array ``key``."""
        info = self.header.tensors[key]
        start = self.header.data_offset + info.start
        return TensorRange(self.path, key, info.dtype, info.shape, start, info.nbytes)

    def build_tensor(self, name: str, blob_tensor: BlobTensor) -> StoredTensor:
        """Return a tensor of this blob as a stored tensor called ``name``."""
        parts = {suffix: self.get_range(key) for suffix, key in blob_tensor.parts.items()}
        value = self.get_range(blob_tensor.key)
        return StoredTensor(
            name, blob_tensor.dtype, blob_tensor.shape, value, blob_tensor.quantization, parts
        )


def read_plain(store: BlobFiles, layer: Layer, name: str) -> StoredTensor | None:
    """Return the tensor of a blob, or None if its header must be parsed.

    The header is compared with the bytes of ``encode_header`` for the layer. This takes half of the
    time of parsing; a model has a thousand blobs.
    """
    dtype, shape = layer.dtype, layer.shape
    if shape is None or dtype not in DTYPE_BITS or dtype == CODES:
        return None
    path = os.fspath(store.find_path(layer.descriptor))
    # Errors are raised by the full read that follows
    with contextlib.suppress(FormatError, OSError):
        header, size = encode_header([(name, dtype, shape)]), compute_nbytes(dtype, shape)
        handle = os.open(path, _FLAGS)
        try:
            is_whole = os.fstat(handle).st_size == layer.descriptor.size == len(header) + size
            if is_whole and os.read(handle, len(header)) == header:
                values = TensorRange(path, name, dtype, shape, len(header), size)
                return StoredTensor(name, dtype, shape, values)
        finally:
            os.close(handle)
    return None


def _read_header(path: str, content: Descriptor) -> Header:
    """Return the header of the file, parsed strictly; a short one takes a single read."""
    handle = os.open(path, _FLAGS)
    try:
        size = os.fstat(handle).st_size
        if size != content.size:
            raise FormatError(f"the file has {size} bytes, expected {content.size}")
        beginning = os.read(handle, _FIRST)
        end = 8 + int.from_bytes(beginning[:8], "little")
        # The same check as in read_header, without a file object
        if end <= min(len(beginning), size):
            return parse_header(beginning[8:end], size - end)
        os.lseek(handle, 0, os.SEEK_SET)
        with io.FileIO(handle, closefd=False) as file:
            return read_header(file, size)
    finally:
        os.close(handle)


def format_names(names: list[str], limit: int = 8) -> str:
    """Return the first names, and the number of the others."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name[:120] for name in names[:limit]) + suffix

"""Tensor values: dtypes and the safetensors header. No numerics library in here."""

from clowder_aimage.tensor.dtype import DTYPE_BITS, nbytes
from clowder_aimage.tensor.header import (
    Header,
    TensorInfo,
    encode_header,
    parse_header,
    read_header,
)

__all__ = [
    "DTYPE_BITS",
    "Header",
    "TensorInfo",
    "encode_header",
    "nbytes",
    "parse_header",
    "read_header",
]

"""Tensor values: dtypes, the safetensors header, blob contents. Uses no numerics library."""

from clowder_aimage.tensor.blob import (
    BlobTensor,
    check_layer,
    find_group,
    find_tensor,
    read_tensors,
)
from clowder_aimage.tensor.header import (
    DTYPE_BITS,
    Header,
    TensorInfo,
    compute_nbytes,
    encode_header,
    parse_header,
    read_header,
)
from clowder_aimage.tensor.quantization import QUANT_TYPES, Quantization

__all__ = [
    "DTYPE_BITS",
    "QUANT_TYPES",
    "BlobTensor",
    "Header",
    "Quantization",
    "TensorInfo",
    "check_layer",
    "compute_nbytes",
    "encode_header",
    "find_group",
    "find_tensor",
    "parse_header",
    "read_header",
    "read_tensors",
]

"""The dtypes of the safetensors format, by the names its header uses."""

from __future__ import annotations

from collections.abc import Sequence

from clowder_aimage.errors import FormatError

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
_MAX_ELEMENTS = 1 << 56


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """The size in bytes of a tensor of ``dtype`` and ``shape``.

    Raises:
        FormatError: for an unknown dtype, a negative dimension, or a product out of reason.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise FormatError(f"unknown dtype {dtype!r:.40}")
    elements = 1
    for dimension in shape:
        if not isinstance(dimension, int) or isinstance(dimension, bool) or dimension < 0:
            raise FormatError(f"not a dimension: {dimension!r:.40}")
        elements *= dimension
        if elements > _MAX_ELEMENTS:
            raise FormatError(f"shape {list(shape)!r:.100} is too large to be real")
    return elements * bits // 8

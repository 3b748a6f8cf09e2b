"""The dtypes of the safetensors format, by the names its header uses.

Source: the reference reader, ``Dtype`` in its tensor.rs, release 0.8. Types below a byte are packed
without gaps: a tensor of them must end at a byte, its rows need not.
"""

from __future__ import annotations

from collections.abc import Sequence

from clowder_aimage.errors import FormatError

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
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
MAX_RANK = 32
"""Dimensions of one tensor; numpy before 2.0 has no more."""
MAX_ELEMENTS = 1 << 56
"""Of one tensor, zeros not counted: then no product, in bits, overflows 63 bits anywhere."""


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a tensor of ``dtype`` and ``shape``.

    Raises:
        FormatError: for an unknown dtype, a negative dimension, a product out of reason, too many
            dimensions, or a tensor of a small type that ends inside a byte.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise FormatError(f"unknown dtype {dtype!r:.40}")
    if len(shape) > MAX_RANK:
        raise FormatError(f"{len(shape)} dimensions are over {MAX_RANK}")
    # A zero must not hide what stands beside it: readers multiply in other orders.
    elements, factor = 1, 1
    for dimension in shape:
        if type(dimension) is not int or dimension < 0:
            raise FormatError(f"not a dimension: {dimension!r:.40}")
        if dimension == 0:
            factor = 0
        else:
            elements *= dimension
            if elements > MAX_ELEMENTS:
                raise FormatError(f"shape {list(shape)!r:.100} is too large to be real")
    size, rest = divmod(elements * factor * bits, 8)
    if rest:
        raise FormatError(f"{dtype} {list(shape)!r:.100} ends inside a byte")
    return size

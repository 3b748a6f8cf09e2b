"""The dtypes of the safetensors format, by the names its header uses.

Source: the reference reader, ``Dtype`` in its tensor.rs, release 0.8. Types below a byte are packed
without gaps: a tensor of them must end at a byte, its rows need not.
"""

from __future__ import annotations

from collections.abc import Sequence

from clowder_aimage.errors import FormatError

_NAMES = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
DTYPE_BITS = {name: bits for bits, names in _NAMES.items() for name in names.split()}
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

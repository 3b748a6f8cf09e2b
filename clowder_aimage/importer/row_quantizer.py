"""Quantization to 8-bit floats with one scale for each row, in the form of mxfp8.

The scale is the least power of two 2**k with largest / 2**k <= 448, the largest E4M3 number, so no
value is beyond it; a row of zeros has 2**-127, the least of E8M0. Codes are the nearest E4M3
numbers, ties to even. All of it is exact in float32 and integers: the bytes are the same on every
machine. Formats: OCP 8-bit Floating Point 1.0; OCP Microscaling Formats 1.0, section 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.importer.precision import widen
from clowder_aimage.tensor.float_code import Bytes, Floats
from clowder_aimage.tensor.quantization import ROW_SCALED

# Values that fit the cache of a core with all their intermediate results
_BLOCK = 1 << 16
# Bits of a float32: without the sign, of the exponent, and the positions of these
_UNSIGNED, _EXPONENT, _MANTISSA = 0x7FFFFFFF, 0x7F800000, 23
# The exponent of the largest number of E4M3, and how far 1.75, its mantissa, is from the next
_LARGEST, _BELOW_NEXT = 8, 0x1FFFFF
# The least exponent of a normal number of E4M3, 2**-6, as that of a float32
_LEAST = 121
# 2**(e + 20) has float32 steps of 2**(e - 3), as E4M3 has at 2**e
_SHIFT = 20


def quantize_rows(rows: npt.NDArray[Any], dtype: str) -> tuple[bytes, bytes]:
    """Return the codes of ``rows``, and their scales, one for 32 values.

    rows: (rows, columns), finite, in whole groups: float16, float32, or the bits of BF16, as
    ``dtype`` says.
    """
    count, columns = rows.shape
    codes, scales = np.empty(rows.shape, np.uint8), np.empty(count, np.uint8)
    step = max(1, _BLOCK // columns)
    for start in range(0, count, step):
        part = slice(start, start + step)
        values = widen(rows[part], dtype)
        largest = (values.view(np.uint32) & np.uint32(_UNSIGNED)).max(axis=1)
        exponents = (largest + _BELOW_NEXT >> _MANTISSA).astype(np.int32)
        scales[part] = np.maximum(exponents - _LARGEST, 0)
        factors = (254 - scales[part].astype(np.uint32) << _MANTISSA).view(np.float32)
        codes[part] = _encode(values * factors[:, None])
    return codes.tobytes(), np.repeat(scales, columns // ROW_SCALED.group_size).tobytes()


def _encode(values: Floats) -> Bytes:
    """Return the codes of values up to 448; ``values`` are overwritten."""
    bits = values.view(np.uint32)
    signs = (bits >> np.uint32(24)).astype(np.uint8)
    signs &= 0x80
    bits &= np.uint32(_UNSIGNED)
    exponents = bits & np.uint32(_EXPONENT)
    np.maximum(exponents, np.uint32(_LEAST << _MANTISSA), out=exponents)
    # The sum has the code's steps: the processor rounds to the nearest, ties to even
    units = exponents + np.uint32(_SHIFT << _MANTISSA)
    values += units.view(np.float32)
    bits -= units
    exponents >>= np.uint32(_MANTISSA - 3)
    exponents -= np.uint32(_LEAST << 3)
    bits += exponents
    codes = bits.astype(np.uint8)
    codes |= signs
    return codes

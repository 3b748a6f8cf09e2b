"""Values of 8-bit and 4-bit float codes, with numpy.

Formats: OCP 8-bit Floating Point 1.0; OCP Microscaling Formats 1.0, section 5.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def decode_e4m3(values: Bytes) -> Floats:
    """Decode OCP 8-bit floats with 4 exponent bits: no infinities, NaN has all bits set."""
    return E4M3[values]


def decode_e5m2(values: Bytes) -> Floats:
    """Decode OCP 8-bit floats with 5 exponent bits: the upper half of a float16."""
    return (values.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


def decode_e8m0(values: Bytes) -> Floats:
    """Decode powers of two. The last one is infinity as in MLX; the specification says NaN."""
    return E8M0[values]


def _build_e4m3_table() -> Floats:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    # S.1111.111 is the only NaN: E4M3 has no infinity, and its other top codes are numbers.
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3 = _build_e4m3_table()
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.inf).astype(np.float32)
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_POSITIVE, -_POSITIVE])

"""Dequantization with numpy alone: MLX's ``dequantize`` in float32.

Affine: code * scale + bias. nvfp4: E2M1 * E4M3. mxfp4: E2M1 * E8M0. mxfp8: E4M3 * E8M0. The lowest
bits of a word are the first value. Products of BF16 and F16 scales and of all float codes are
exact in float32, so the order of computation does not matter. Formats: OCP Microscaling Formats
1.0, section 5; OCP 8-bit Floating Point 1.0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clowder_aimage.tensor import Quantization

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def e4m3(values: Bytes) -> Floats:
    """Decode OCP 8-bit floats with 4 exponent bits: no infinities, NaN has all bits set."""
    return _E4M3[values]


def e5m2(values: Bytes) -> Floats:
    """Decode OCP 8-bit floats with 5 exponent bits: the upper half of a float16."""
    return (values.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


def e8m0(values: Bytes) -> Floats:
    """Decode powers of two. The last one is infinity as in MLX; the specification says NaN."""
    return _E8M0[values]


def unpack(codes: npt.NDArray[np.uint32], bits: int) -> Bytes:
    """Unpack words of shape (..., words) to codes of 4 or 8 bits, (..., words * 32 / bits)."""
    octets = np.ascontiguousarray(codes).view(np.uint8)
    if bits == 8:
        return octets
    pairs = np.stack([octets & 15, octets >> 4], axis=-1)
    return pairs.reshape(*octets.shape[:-1], -1)


def dequantize(
    quantization: Quantization,
    codes: npt.NDArray[np.uint32],
    scales: Floats | Bytes,
    biases: Floats | None = None,
    global_scale: Floats | None = None,
) -> Floats:
    """Return the values of ``codes`` (rows, words): (rows, columns), in float32.

    scales, biases: (rows, groups), float32 for affine types, bytes for the others. Matrices may be
    stacked. global_scale: one factor per tensor, per matrix of a stack, or per row.
    """
    kind = quantization.type
    found = unpack(codes, kind.bits)
    grouped = found.reshape(*found.shape[:-1], -1, quantization.group_size)
    if biases is not None:
        values = grouped.astype(np.float32) * scales[..., None] + biases[..., None]
    else:
        table = _E4M3 if kind.bits == 8 else _E2M1
        decode = _E4M3 if kind.name == "nvfp4" else _E8M0
        values = table[grouped] * decode[scales][..., None]
    values = values.reshape(found.shape)
    if global_scale is None:
        return values
    return values * global_scale.reshape(factor_shape(global_scale.shape, values.ndim))


def factor_shape(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return the shape in which factors of ``shape`` broadcast to values of ``ndim`` dimensions.

    The dimensions are the leading ones of the values, followed by ones.
    """
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape + (1,) * (ndim - len(shape))


def _e4m3_table() -> Floats:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


_E4M3 = _e4m3_table()
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.inf).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])

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
from clowder_aimage.tensor.float_code import E2M1, E4M3, E8M0, Bytes, Floats


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
    unpacked = unpack(codes, kind.bits)
    grouped = unpacked.reshape(*unpacked.shape[:-1], -1, quantization.group_size)
    if biases is not None:
        values = grouped.astype(np.float32) * scales[..., None] + biases[..., None]
    else:
        table = E4M3 if kind.bits == 8 else E2M1
        decode = E4M3 if kind.name == "nvfp4" else E8M0
        values = table[grouped] * decode[scales][..., None]
    values = values.reshape(unpacked.shape)
    if global_scale is None:
        return values
    return values * global_scale.reshape(compute_factor_shape(global_scale.shape, values.ndim))


def compute_factor_shape(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return the shape for factors of ``shape`` to broadcast to values of ``ndim`` dimensions.

    The dimensions are the leading ones of the values, followed by ones.
    """
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape + (1,) * (ndim - len(shape))

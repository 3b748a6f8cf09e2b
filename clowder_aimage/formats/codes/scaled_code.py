"""Arithmetic of ComfyUI's quantized weights, in float32, with numpy.

A value is a code times a scale: one for the tensor or for each row (float8, int8_tensorwise), a
power of two for 32 values (mxfp8), or a scale for 16 values times one for the tensor (nvfp4:
``(scale_2 * scale) * code``). Each product is rounded once, to float32.

Rotated groups (convrot) are multiplied by the Hadamard matrix that made them, which is its own
inverse: sums of codes are exact, and rounded once when they are scaled.

Scales of blocks are in the order of the GPU: tiles of 128 rows and 4 columns, in which row
``32 * a + b`` is the ``a``-th group of 4 bytes in line ``b`` of 16 bytes. Sources: cuBLAS, "1D
Block Scaling Factors Layout"; comfy/quant_ops.py of ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from clowder_aimage.tensor.float_code import E2M1, E4M3, E8M0, Bytes, Floats, decode_e5m2

E4M3FN, E5M2, INT8, MXFP8, NVFP4 = (
    *("float8_e4m3fn", "float8_e5m2"),
    *("int8_tensorwise", "mxfp8", "nvfp4"),
)
# The format of int8_tensorwise with rotated groups.
ROTATED = "int8_convrot"
# Values of a scale.
GROUPS = {MXFP8: 32, NVFP4: 16}
# Rows of a tile, its lines, its columns.
_TILE, _LINES, _WIDTH = 128, 32, 4
_CODES = np.arange(256, dtype=np.uint8)
_ONE = np.ones(1, np.float32)
Values = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


def compute_code_values(kind: str) -> Floats:
    """Return the values of all codes of a format, without scales."""
    if kind == NVFP4:
        return E2M1
    if kind in (INT8, ROTATED):
        return _CODES.view(np.int8).astype(np.float32)
    return decode_e5m2(_CODES) if kind == E5M2 else E4M3


def compute_scale_values(kind: str, factors: Floats) -> Floats:
    """Return the scales of a format: of each code of a scale, or ``factors`` without blocks."""
    if kind == MXFP8:
        return E8M0
    return E4M3 * factors if kind == NVFP4 else factors


def build_table(kind: str, factors: Floats = _ONE) -> Floats:
    """Return the value of each scale (rows) and each code (columns)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return compute_scale_values(kind, factors)[:, None] * compute_code_values(kind)[None, :]


def as_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the upper halves of float32 values: their bits in BF16, if they fit."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def fits_bf16(values: Floats) -> bool:
    """Return True if all values but NaN are exact in BF16."""
    bits = values.view(np.uint32)
    return not bool((bits[~np.isnan(values)] & 0xFFFF).any())


def compute_scales_shape(kind: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of blocks, in whole tiles."""
    blocks = columns // GROUPS[kind]
    return -(-rows // _TILE) * _TILE, -(-blocks // _WIDTH) * _WIDTH


def reorder_scales(kind: str, scales: bytes, rows: int, columns: int) -> Bytes:
    """Return the scales of blocks by rows, from the order of the GPU, without the padding."""
    height, width = compute_scales_shape(kind, rows, columns)
    tiles = np.frombuffer(scales, np.uint8)
    tiles = tiles.reshape(height // _TILE, width // _WIDTH, _LINES, _TILE // _LINES, _WIDTH)
    ordered = tiles.transpose(0, 3, 2, 1, 4).reshape(height, width)
    return ordered[:rows, : columns // GROUPS[kind]].reshape(-1)


def build_decoder(
    kind: str, columns: int, dtype: str, factors: Floats, scales: Bytes, group: int = 1
) -> Callable[[Bytes, int], Values]:
    """Return a function of codes, and the position of the first value in the matrix, to values.

    ``columns`` is the length of the matrix's rows, ``dtype`` F32 or BF16. ``factors`` are the scale
    of the tensor or of each row, ``scales`` those of blocks by rows, ``group`` the size of rotated
    groups. Codes are whole blocks and groups.
    """
    if kind == ROTATED:
        return _build_group_decoder(columns, factors, group)
    if kind in GROUPS:
        return _build_block_decoder(kind, _as_dtype(build_table(kind, factors), dtype), scales)
    if factors.size > 1:
        return _build_row_decoder(kind, columns, factors)
    values = _as_dtype(build_table(kind, factors), dtype)
    return lambda codes, _: values[codes]


def _as_dtype(values: Floats, dtype: str) -> Values:
    flat = values.reshape(-1)
    return as_bf16(flat) if dtype == "BF16" else flat


def _build_row_decoder(kind: str, columns: int, factors: Floats) -> Callable[[Bytes, int], Values]:
    values = compute_code_values(kind)

    def decode(codes: Bytes, position: int) -> Values:
        rows = np.arange(position, position + codes.size) // columns
        return values[codes] * factors[rows]

    return decode


def _build_group_decoder(
    columns: int, factors: Floats, group: int
) -> Callable[[Bytes, int], Values]:
    matrix = build_rotation(group)
    # A power of two, since groups are powers of four: the division is exact.
    scales = factors / np.float32(group**0.5)

    def decode(codes: Bytes, position: int) -> Values:
        sums = codes.view(np.int8).astype(np.float32).reshape(-1, group) @ matrix
        rows = (np.arange(len(sums)) * group + position) // columns
        factor = scales[rows] if scales.size > 1 else scales
        decoded: Values = (sums * factor[:, None]).reshape(-1)
        return decoded

    return decode


def build_rotation(size: int) -> Floats:
    """Return the regular Hadamard matrix of a power of four: symmetric, of 1 and -1."""
    base = 1 - 2 * np.eye(4, dtype=np.float32)[::-1]
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.kron(matrix, base)
    return matrix


def _build_block_decoder(
    kind: str, values: Values, scales: Bytes
) -> Callable[[Bytes, int], Values]:
    group, bits = GROUPS[kind], 4 if kind == NVFP4 else 8

    def decode(codes: Bytes, position: int) -> Values:
        if kind == NVFP4:
            # The upper half of a byte is the first value.
            codes = np.stack([codes >> 4, codes & 15], axis=-1)
        codes, block = codes.reshape(-1, group), position // group
        factors = scales[block : block + len(codes)].astype(np.uint16)
        decoded: Values = values[(factors[:, None] << bits | codes).reshape(-1)]
        return decoded

    return decode

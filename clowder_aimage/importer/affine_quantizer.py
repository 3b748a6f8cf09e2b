"""Quantization to int4 and int8: bit for bit MLX's, which takes twice as long on a CPU.

A group has the codes 0 to 2**bits - 1 between its least and its largest value. The bias is the one
of them that is farther from zero, and the scale is such that zero has a code. Source: ``quantize``
of mlx/backend/cpu/quantized.cpp; all of it is float32, and only scales and biases are rounded.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from clowder_aimage.importer import precision
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.float_code import Floats

Words = npt.NDArray[Any]

# Values that fit the cache of a core with all their intermediate results
_BLOCK = 1 << 17
# A number of 16 bytes, so that several adjacent values are moved at once
_PACK = np.dtype("c16")
# Packed codes of a number of such bytes, to be moved at once
_CODES = {2: "u2", 4: "u4", 8: "u8"}
# A float32 of at least this has no digits after the point: adding it rounds, ties to even
_UNITS = np.float32(2**23)
_LEAST_SCALE = np.float32(1e-7)


def quantize_affine(
    rows: Words, dtype: str, quantization: Quantization
) -> tuple[bytes, bytes, bytes]:
    """Return the codes, the scales and the biases of ``rows``, whole groups of finite values.

    rows: float16, float32, or the bits of BF16, as ``dtype`` says; scales and biases are as well.
    """
    size, bits = quantization.group_size, quantization.type.bits
    width = _PACK.itemsize // rows.itemsize  # values of a pack
    groups = rows.reshape(-1).view(_PACK).reshape(-1, size // width)
    code = _CODES[width * bits // 8]
    codes = np.empty(groups.shape, code)
    parameters = np.empty((2, len(groups)), np.float32)
    step = _BLOCK // size
    for start in range(0, len(groups), step):
        part = slice(start, start + step)
        # A row is the same few values of each group, so that operations are on long rows
        packs = np.array(groups[part].T, order="C")
        values = precision.widen(packs.view(rows.dtype), dtype)
        scale, bias = _choose_scales(
            _reduce(np.maximum, values, width), _reduce(np.minimum, values, width), bits
        )
        parameters[:, part] = scale, bias
        values -= np.repeat(bias, width)
        values /= np.repeat(scale, width)
        np.clip(values, 0, np.float32(2**bits - 1), out=values)
        values += _UNITS
        low = values.view(np.uint32).astype(np.uint8)
        codes[part] = (low if bits == 8 else _pack_pairs(low)).view(code).T
    scales, biases = (
        precision.cast(memoryview(cast(Any, row)).cast("B"), "F32", dtype)[0] for row in parameters
    )
    return codes.tobytes(), scales.tobytes(), biases.tobytes()


def _reduce(function: np.ufunc, values: Floats, width: int) -> Floats:
    """Return a value for each group; a row has ``width`` values of each. numpy: slow on these."""
    row = function.reduce(values, axis=0)
    result: Floats = row[::width].copy()
    for place in range(1, width):
        function(result, row[place::width], out=result)
    return result


def _choose_scales(largest: Floats, least: Floats, bits: int) -> tuple[Floats, Floats]:
    """Return the scales and the biases of groups."""
    is_least_farther = np.abs(least) > np.abs(largest)
    scale = np.maximum((largest - least) / np.float32(2**bits - 1), _LEAST_SCALE)
    scale = np.where(is_least_farther, scale, -scale)
    edge = np.where(is_least_farther, least, largest)
    code = np.rint(edge / scale)
    is_zero = code == 0
    code[is_zero] = 1
    return np.where(is_zero, scale, edge / code), np.where(is_zero, np.float32(0), edge)


def _pack_pairs(codes: Words) -> Words:
    """Return codes of four bits, two to a byte."""
    pairs = codes.view(np.uint16)
    pairs |= pairs >> 4
    return pairs.astype(np.uint8)

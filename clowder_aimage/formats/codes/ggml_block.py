"""Values of GGUF's quantized blocks, in float32, with numpy.

The layouts are those of ggml-org/ggml, src/ggml-common.h (``block_q4_0`` and so on), and the
order of the products and sums is that of the package ``gguf``, so that all bits are equal. Blocks
are arrays (blocks, bytes); d is the scale, m the minimum of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # kvalues_iq4nl


def _half(blocks: Array, start: int) -> Array:
    """Return the float16 at byte ``start`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _fields(packed: Array, bits: int, run: int) -> Array:
    """Unpack runs of ``run`` bytes: the lowest ``bits`` of all bytes of a run come first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _high(words: Array) -> Array:
    """Return the fifth bits of 32 values, in place, from 4 bytes."""
    return np.unpackbits(np.ascontiguousarray(words), axis=1, bitorder="little") << 4


def _signed(codes: Array, zero: int) -> Array:
    return codes.astype(np.float32) - np.float32(zero)


def _groups(factors: Array, values: Array) -> Array:
    """Return each group of values times its factor: (blocks, groups) by (blocks, values)."""
    grouped = values.reshape(*factors.shape, -1)
    return (factors[..., None] * grouped).reshape(values.shape)


def _less(values: Array, minima: Array) -> Array:
    return (values.reshape(*minima.shape, -1) - minima[..., None]).reshape(values.shape)


def _q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * _signed(_fields(blocks[:, 2:], 4, 16), 8)


def _q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _signed(_fields(blocks[:, 4:], 4, 16), 0) + _half(blocks, 2)


def _q5_0(blocks: Array) -> Array:
    codes = _fields(blocks[:, 6:], 4, 16) | _high(blocks[:, 2:6])
    return _half(blocks, 0) * _signed(codes, 16)


def _q5_1(blocks: Array) -> Array:
    codes = _fields(blocks[:, 8:], 4, 16) | _high(blocks[:, 4:8])
    return _half(blocks, 0) * _signed(codes, 0) + _half(blocks, 2)


def _q8_0(blocks: Array) -> Array:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: Array) -> Array:
    scales = blocks[:, :16]
    factors = _half(blocks, 80) * _signed(scales & 15, 0)
    minima = _half(blocks, 82) * _signed(scales >> 4, 0)
    return _less(_groups(factors, _signed(_fields(blocks[:, 16:80], 2, 32), 0)), minima)


def _q3_k(blocks: Array) -> Array:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    factors = _half(blocks, 108) * _signed(low | high << 4, 32)
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return _groups(factors, _signed(codes, 4))


def _scales_k(blocks: Array) -> tuple[Array, Array]:
    """Return factors and minima of 8 groups, 6 bits each in the bytes from 4 to 16."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return _half(blocks, 0) * _signed(scales, 0), _half(blocks, 2) * _signed(minima, 0)


def _q4_k(blocks: Array) -> Array:
    factors, minima = _scales_k(blocks)
    return _less(_groups(factors, _signed(_fields(blocks[:, 16:], 4, 32), 0)), minima)


def _q5_k(blocks: Array) -> Array:
    factors, minima = _scales_k(blocks)
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _less(_groups(factors, _signed(codes, 0)), minima)


def _q6_k(blocks: Array) -> Array:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _groups(_half(blocks, 208) * scales, _signed(codes, 32))


def _iq4_nl(blocks: Array) -> Array:
    return _half(blocks, 0) * _LEVELS[_fields(blocks[:, 2:], 4, 16)]


def _iq4_xs(blocks: Array) -> Array:
    low, high = _fields(blocks[:, 4:8], 4, 1), _fields(blocks[:, 2:4], 2, 1)
    factors = _half(blocks, 0) * _signed(low | high << 4, 32)
    return _groups(factors, _LEVELS[_fields(blocks[:, 8:], 4, 16)])


DECODERS: Mapping[str, Callable[[Array], Array]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""Functions of blocks (blocks, bytes) to values (blocks, values), by the type's name."""

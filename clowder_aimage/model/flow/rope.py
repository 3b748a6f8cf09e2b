"""Rotary embeddings: one axis in halves (Qwen), several axes in pairs (Z-Image, FLUX.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.backend import mx
from clowder_aimage.model.compute.array_block import Array, Floats, run_in_blocks, view_memory
from clowder_aimage.model.flow.rope_table import (
    FloatTable,
    compute_axes_table,
    compute_text_table,
)
from clowder_aimage.model.rope_config import RopeConfig

# Cosines and sines
Table = tuple[mx.array, mx.array]


def _to_arrays(table: FloatTable) -> Table:
    cosines, sines = table
    return mx.array(cosines), mx.array(sines)


def build_text_table(config: RopeConfig, length: int) -> Table:
    """Return tables of shape (length, dim / 2) for the positions 0 to length - 1."""
    return _to_arrays(compute_text_table(config, length))


def rotate_halves(arrays: list[Array], rope: Table) -> list[Array]:
    """Rotate channel i with channel i + d/2. tables: (length, d/2).

    arrays: (1, length, heads, d); they may be overwritten.
    """
    if not isinstance(arrays[0], np.ndarray):
        return [_rotate_half_arrays(array, rope) for array in arrays]
    tables = (view_memory(table)[:, None] for table in rope)
    run_in_blocks(_turn_halves, *tables, *(array[0] for array in arrays))
    return arrays


def _turn_halves(cosines: Floats, sines: Floats, *arrays: Floats) -> None:
    for array in arrays:
        low, high = np.split(array, 2, axis=-1)
        turned = low * cosines - high * sines
        high *= cosines
        high += low * sines
        low[...] = turned


def _rotate_half_arrays(x: mx.array, rope: Table) -> mx.array:
    cosines, sines = (component[:, None].astype(x.dtype) for component in rope)
    low, high = mx.split(x, 2, axis=-1)
    return mx.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)


def rotate_pairs(arrays: list[Array], rope: Table) -> list[Array]:
    """Rotate channel 2i with 2i + 1, in float32; tables: (length, d/2).

    arrays: (1, length, heads, d); they may be overwritten.
    """
    if not isinstance(arrays[0], np.ndarray):
        return [_rotate_pair_array(array, *rope) for array in arrays]
    cosines, sines = (view_memory(table) for table in rope)
    # A pair of channels is a complex number, and its rotation one product
    turns = cosines + 1j * sines
    run_in_blocks(_turn, turns[:, None], *(array[0].view(np.complex64) for array in arrays))
    return arrays


def _rotate_pair_array(x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    cosines, sines = cosines[:, None], sines[:, None]
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = mx.stack([even * cosines - odd * sines, even * sines + odd * cosines], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _turn(turns: npt.NDArray[np.complex64], *arrays: npt.NDArray[np.complex64]) -> None:
    for pairs in arrays:
        pairs *= turns


def build_axes_table(
    positions: npt.NDArray[np.int64],
    axes_dims: tuple[int, ...],
    theta: float,
    *,
    is_exact: bool = False,
) -> Table:
    """Return tables (length, sum(axes_dims) / 2) for positions of shape (length, axes).

    Angles are rounded to float32, unless ``is_exact``.
    """
    return _to_arrays(compute_axes_table(positions, axes_dims, theta, is_exact=is_exact))

"""Operations of networks: with MLX, or with numpy and OpenBLAS if MLX computes slowly.

The type of an array decides: networks convert their input (``array_block.to_fastest``), and both
libraries' arrays have the same shapes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clowder_aimage.model import backend
from clowder_aimage.model.backend import mx
from clowder_aimage.model.compute.array_block import (
    Array,
    Floats,
    contiguous,
    is_slow,
    run_in_blocks,
    view_memory,
)
from clowder_aimage.model.hardware import count_cores
from clowder_aimage.tensor import blas

# Elements up to which a copy takes less time than an operation of MLX
_COPIED = 48 * 1024


class Linear(backend.Linear):
    """``mlx.nn.Linear`` with a fast BLAS."""

    def __call__(self, x: Array) -> Array:
        """Return x @ weight^T + bias. x: (..., inputs)."""
        return linear(x, self.weight, self.get("bias"))


class RMSNorm(backend.RMSNorm):
    """``mlx.nn.RMSNorm``, also for numpy's arrays."""

    def __call__(self, x: Array) -> Array:
        """Return x over its root mean square, times the weight. x: (1, length, ..., width)."""
        if isinstance(x, np.ndarray):
            return modulate(self, x)
        return super().__call__(x)  # type: ignore[no-untyped-call]

    def write(self, x: Floats, result: Floats) -> None:
        """Write the normed x to ``result``; it may be x."""
        squares = np.einsum("...i,...i->...", x, x)[..., None]
        squares /= x.shape[-1]
        squares += self.eps
        np.divide(x, np.sqrt(squares, out=squares), out=result)
        result *= view_memory(self.weight)


class LayerNorm(backend.LayerNorm):
    """``mlx.nn.LayerNorm`` without weights, also for numpy's arrays."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps, affine=False)

    def __call__(self, x: Array) -> Array:
        """Return x less its mean, over its standard deviation. x: (1, length, ..., width)."""
        if isinstance(x, np.ndarray):
            return modulate(self, x)
        return super().__call__(x)  # type: ignore[no-untyped-call]

    def write(self, x: Floats, result: Floats) -> None:
        """Write the normed x to ``result``; it may be x."""
        np.subtract(x, x.mean(axis=-1, keepdims=True), out=result)
        squares = np.einsum("...i,...i->...", result, result)[..., None]
        squares /= x.shape[-1]
        squares += self.eps
        result /= np.sqrt(squares, out=squares)


def get_library(x: Array) -> Any:
    """Return the library of an array, numpy or MLX; their functions have the same names."""
    return np if isinstance(x, np.ndarray) else mx


def linear(x: Array, weight: mx.array, bias: mx.array | None) -> Array:
    """Return x @ weight^T + bias. x: (..., inputs); weight: (outputs, inputs)."""
    if isinstance(x, np.ndarray):
        result = np.empty((*x.shape[:-1], len(weight)), dtype=np.float32)
        _multiply(x, weight, bias, result)
        return result
    if not is_slow(x) or not blas.is_fast():
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
    x, written = contiguous(x, _new((*x.shape[:-1], len(weight))))
    _multiply(view_memory(x), weight, bias, view_memory(written))
    return written


def _multiply(x: Floats, weight: mx.array, bias: mx.array | None, result: Floats) -> None:
    (weight,) = contiguous(weight)
    blas.use_cores(count_cores())
    rows = result.reshape(-1, len(weight))
    blas.multiply(_flatten_rows(x), view_memory(weight).T, rows)
    if bias is not None:
        rows += view_memory(bias)


def _flatten_rows(x: Floats) -> Floats:
    """Return all rows of x, (count, width), each of them adjacent numbers."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.strides[1] == rows.itemsize else np.ascontiguousarray(rows)


def add_low_rank(y: Array, x: Array, down: mx.array, up: mx.array, scales: mx.array) -> Array:
    """Return y + ((x @ down^T) * scales) @ up^T. y: (..., outputs); it may be overwritten.

    x: (..., inputs); down: (rank, inputs); up: (outputs, rank); scales: (rank,).
    """
    if not isinstance(x, np.ndarray):
        return y + linear(linear(x, down, None) * scales, up, None)
    factors = _flatten_rows(linear(x, down, None))
    up, scales = contiguous(up, scales)
    factors *= view_memory(scales)
    blas.multiply(factors, view_memory(up).T, y.reshape(-1, len(up)), is_sum=True)
    return y


def modulate(norm: Any, x: Array, scale: Array | None = None, shift: Array | None = None) -> Array:
    """Return norm(x) * (1 + scale) + shift, or without them.

    x: (1, length, ..., width); scale and shift: (1, 1, width).
    """
    if not isinstance(x, np.ndarray):
        x = norm(x)
        x = x if scale is None else x * (1 + scale)
        return x if shift is None else x + shift
    result = np.empty(x.shape, dtype=np.float32)
    factor = None if scale is None else 1 + scale[0, 0]

    def compute(x: Floats, result: Floats) -> None:
        norm.write(x, result)
        if factor is not None:
            result *= factor
        if shift is not None:
            result += shift[0, 0]

    run_in_blocks(compute, x[0], result[0])
    return result


def add(x: Array, change: Array, gate: Array | None = None, norm: RMSNorm | None = None) -> Array:
    """Return x + gate * norm(change), or without gate or norm; change may be overwritten.

    x and change: (1, length, width); gate: (1, 1, width).
    """
    if not isinstance(x, np.ndarray):
        change = change if norm is None else norm(change)
        return x + (change if gate is None else gate * change)

    def compute(x: Floats, change: Floats) -> None:
        if norm is not None:
            norm.write(change, change)
        if gate is not None:
            change *= gate[0, 0]
        change += x

    run_in_blocks(compute, x[0], change[0])
    return change


def silu(x: Array) -> Array:
    """Return x * sigmoid(x), of any shape, in the type of x."""
    if not isinstance(x, np.ndarray):
        return x * mx.sigmoid(x)
    overwrite_with_silu(result := x.copy())
    return result


def swiglu_in_place(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up. Both: (1, length, width); gate may be overwritten."""
    if not isinstance(gate, np.ndarray):
        return silu(gate) * up
    run_in_blocks(_overwrite_with_swiglu, gate[0], up[0])
    return gate


def _new(shape: tuple[int, ...]) -> mx.array:
    """Return an array of any values."""
    if math.prod(shape) > _COPIED:
        return mx.zeros(shape)
    return mx.array(np.empty(shape, dtype=np.float32))


def overwrite_with_silu(x: Floats) -> None:
    """Overwrite x with x * sigmoid(x)."""
    divisor = np.negative(x)
    np.exp(divisor, out=divisor)
    divisor += 1
    x /= divisor


def _overwrite_with_swiglu(gate: Floats, up: Floats) -> None:
    overwrite_with_silu(gate)
    gate *= up

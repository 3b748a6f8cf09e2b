"""Attention and activations, in numpy where MLX computes slowly: in float32 on a CPU.

There MLX's exponential is scalar code on one thread, 13 ns per element on x86, and its compiled
functions require a C++ compiler. numpy's is vectorized, 0.5 ns, and computes in MLX's own
memory, in blocks that stay in the processor's cache, on all cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from clowder_aimage.model import backend
from clowder_aimage.model.backend import mx, on_gpu
from clowder_aimage.model.hardware import cores
from clowder_aimage.tensor import blas

MAX_SCORES = 256 * 1024 * 1024  # bytes of attention scores at a time
_SCORES = 128 * 1024  # scores that a core computes at a time
BLOCK = 32 * 1024  # elements that a core computes at a time
_LEAST = 64 * 1024  # elements for which a second core is used
_COPIED = 48 * 1024  # elements up to which a copy takes less time than an operation of MLX
_FUSED = (64, 80, 128)  # head dimensions for which a GPU stores no scores

Floats = npt.NDArray[np.float32]
T = TypeVar("T")


class Linear(backend.Linear):
    """``mlx.nn.Linear`` with a fast BLAS."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return x @ weight^T + bias. x: (..., inputs)."""
        return linear(x, self.weight, self.get("bias"))


def linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """Return x @ weight^T + bias. x: (..., inputs); weight: (outputs, inputs)."""
    if not is_slow(x) or not blas.is_fast():
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
    result = _new((*x.shape[:-1], len(weight)))
    x, result, weight, *more = contiguous(x, result, weight, *([] if bias is None else [bias]))
    rows = memory(result).reshape(-1, len(weight))
    blas.use_cores(cores())
    blas.multiply(memory(x).reshape(-1, x.shape[-1]), memory(weight).T, rows)
    if more:
        rows += memory(more[0])
    return result


def add_low_rank(
    y: mx.array, x: mx.array, down: mx.array, up: mx.array, scales: mx.array
) -> mx.array:
    """Return y + ((x @ down^T) * scales) @ up^T. y: (..., outputs), which may be overwritten.

    x: (..., inputs); down: (rank, inputs); up: (outputs, rank); scales: (rank,).
    """
    if not is_slow(x) or not blas.is_fast():
        return y + ((x @ down.T) * scales) @ up.T
    middle = linear(x, down, None)
    y, middle, up, scales = contiguous(y, middle, up, scales)
    factors = memory(middle).reshape(-1, len(down))
    factors *= memory(scales)
    blas.use_cores(cores())
    blas.multiply(factors, memory(up).T, memory(y).reshape(-1, len(up)), is_sum=True)
    return y


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x), of any shape, in the type of x."""
    return x * mx.sigmoid(x)


def silu_in_place(x: mx.array) -> mx.array:
    """Return x * sigmoid(x), of any shape, in the type of x. x may be overwritten."""
    if not is_slow(x):
        return silu(x)
    (x,) = contiguous(x)
    in_blocks(overwrite_with_silu, memory(x).reshape(-1))
    return x


def swiglu_in_place(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, of the same shape. gate may be overwritten."""
    if not is_slow(gate):
        return silu(gate) * up
    gate, up = contiguous(gate, up)
    in_blocks(_swiglu, memory(gate).reshape(-1), memory(up).reshape(-1))
    return gate


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None = None,
) -> mx.array:
    """Return softmax(scale * queries @ keys^T) @ values, without storing more than MAX_SCORES.

    queries: (1, length, heads, channels); keys and values: (1, length, fewer heads, channels), each
    used by as many heads; mask: (length, length), True where a key is seen. Returns the shape
    of queries, which may be overwritten.
    """
    _, length, heads, channels = queries.shape
    if is_slow(queries) and blas.is_fast():
        return _attention_by_tiles(queries, keys, values, scale, mask)
    queries, keys, values = (each.transpose(0, 2, 1, 3) for each in (queries, keys, values))
    rows = length
    if not on_gpu() or channels not in _FUSED:
        rows = min(length, max(1, MAX_SCORES // (heads * length * queries.dtype.size)))
    compute = mx.fast.scaled_dot_product_attention
    parts = []
    for row in range(0, length, rows):
        seen = None if mask is None else mask[row : row + rows]
        part = queries[:, :, row : row + rows]
        parts.append(compute(part, keys, values, scale=scale, mask=seen))
        if rows < length:
            mx.eval(parts[-1])  # MLX would compute the scores of several parts first
    return mx.concatenate(parts, axis=2).transpose(0, 2, 1, 3)


def _attention_by_tiles(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Compute some rows of a head at a time, whose scores stay in the processor's cache."""
    _, length, heads, _ = queries.shape
    columns, groups = keys.shape[1:3]
    queries, keys, values = contiguous(queries, keys, values)
    query, key, value = (memory(array) for array in (queries, keys, values))
    hidden = None if mask is None else np.logical_not(memory(*contiguous(mask)))
    step = max(16, _SCORES // columns)

    def tile(index: int) -> None:
        head, start = index % heads, index // heads * step
        group, rows = head * groups // heads, slice(start, start + step)
        own = query[0, rows, head]
        seen = columns if hidden is None else _seen_columns(hidden[rows])
        scores = np.empty((len(own), seen), dtype=np.float32)
        blas.multiply(own, key[0, :seen, group].T, scores, scale)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden[rows, :seen])
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        sums = scores.sum(axis=1, keepdims=True)
        blas.multiply(scores, value[0, :seen, group], own)  # these queries are not read again
        own /= sums

    tiles = range(heads * -(-length // step))
    on_all_cores(tile, tiles, heads * length * columns, multiplies=True)
    return queries


def _seen_columns(hidden: npt.NDArray[np.bool_]) -> int:
    """Return the number of columns up to the last one that a row sees; all others are hidden."""
    return int(np.flatnonzero(~hidden.all(axis=0)).max(initial=0)) + 1


# -- in the memory of MLX


def is_slow(x: mx.array) -> bool:
    """Return True for float32 on a CPU."""
    return x.dtype == mx.float32 and not on_gpu()


def contiguous(*arrays: mx.array) -> list[mx.array]:
    """Return the arrays evaluated and in row order; those that are already share their memory."""
    mx.eval(arrays)
    ordered = [a if memory(a).flags.c_contiguous else mx.contiguous(a) for a in arrays]
    mx.eval(ordered)
    return ordered


def _new(shape: tuple[int, ...]) -> mx.array:
    """Return an array of any values."""
    if math.prod(shape) > _COPIED:
        return mx.zeros(shape)
    return mx.array(np.empty(shape, dtype=np.float32))


def memory(x: mx.array) -> Floats:
    """Return the memory of an evaluated array, to read and to write."""
    return np.array(x, copy=False)


def overwrite_with_silu(x: Floats) -> None:
    """Overwrite x with x * sigmoid(x)."""
    divisor = np.negative(x)
    np.exp(divisor, out=divisor)
    divisor += 1
    x /= divisor


def _swiglu(gate: Floats, up: Floats) -> None:
    overwrite_with_silu(gate)
    gate *= up


def in_blocks(compute: Callable[..., None], *arrays: npt.NDArray[Any]) -> None:
    """Call ``compute`` with slices of all arrays along their first axis, on all cores."""
    first = arrays[0]
    step = max(1, BLOCK * len(first) // max(1, first.size))

    def block(start: int) -> None:
        compute(*(array[start : start + step] for array in arrays))

    on_all_cores(block, range(0, len(first), step), max(array.size for array in arrays))


def on_all_cores(
    compute: Callable[[T], None], items: Sequence[T], size: int, *, multiplies: bool = False
) -> None:
    """Call ``compute`` for each item, on all cores if there are many elements (``size``) in all.

    ``multiplies``: it calls the BLAS, which then uses the calling core only.
    """
    coming = iter(items)  # shared: a core that is slower computes fewer of them

    def work() -> None:
        with np.errstate(all="ignore"):  # pictures are checked for NaN
            for item in coming:
                compute(item)

    count = min(cores(), len(items), 1 + size // _LEAST)
    if multiplies:
        blas.use_cores(1)
    others = [_pool().submit(work) for _ in range(count - 1)]
    try:
        work()
    finally:
        for other in others:
            other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="aimage-mlx-operation")

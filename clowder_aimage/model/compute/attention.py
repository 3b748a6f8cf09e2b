"""Attention: with MLX, or by tiles with numpy and OpenBLAS, whose scores are never stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.backend import mx, on_gpu
from clowder_aimage.model.compute.array_block import (
    Array,
    Floats,
    contiguous,
    is_slow,
    memory,
    on_all_cores,
)
from clowder_aimage.model.hardware import cores
from clowder_aimage.tensor import blas

MAX_SCORES = 256 * 1024 * 1024  # bytes of attention scores at a time
_SCORES = 256 * 1024  # scores that a core computes at a time
_FUSED = (64, 80, 128)  # head dimensions for which a GPU stores no scores


def attention(
    queries: Array, keys: Array, values: Array, scale: float, mask: mx.array | None = None
) -> Array:
    """Return softmax(scale * queries @ keys^T) @ values, without storing more than MAX_SCORES.

    queries: (1, length, heads, channels); keys and values: (1, length, fewer heads, channels), each
    used by as many heads; mask: (length, length), True where a key is seen. Returns the shape
    of queries, which may be overwritten.
    """
    if isinstance(queries, np.ndarray):
        _by_tiles(queries[0], keys[0], values[0], scale, mask)
        return queries
    if is_slow(queries) and blas.is_fast():
        queries, keys, values = contiguous(queries, keys, values)
        attention(memory(queries), memory(keys), memory(values), scale, mask)
        return queries
    _, length, heads, channels = queries.shape
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


def _by_tiles(
    query: Floats, key: Floats, value: Floats, scale: float, mask: mx.array | None
) -> None:
    """Overwrite the queries: some rows of few heads at a time, whose scores stay in the cache.

    All are (length, heads, channels), whose channels are adjacent.
    """
    length, heads, _ = query.shape
    columns, groups = key.shape[:2]
    hidden = None if mask is None else np.logical_not(memory(*contiguous(mask)))
    most = columns if hidden is None else _seen_columns(hidden)
    step = min(max(16, _SCORES // most), -(-length // cores()))
    few = max(1, _SCORES // (step * most))  # heads

    def tile(place: tuple[int, int]) -> None:
        start, first = place
        own = query[start : start + step, first : first + few]
        rows = slice(start, start + len(own))
        seen = columns if hidden is None else _seen_columns(hidden[rows])
        scores = np.empty((own.shape[1], len(own), seen), dtype=np.float32)
        shared = [head * groups // heads for head in range(first, first + len(scores))]
        for head, group in enumerate(shared):
            blas.multiply(own[:, head], key[:seen, group].T, scores[head], scale)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden[rows, :seen])
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        sums = scores.sum(axis=2)
        for head, group in enumerate(shared):  # these queries are not read again
            blas.multiply(scores[head], value[:seen, group], own[:, head])
        own /= sums.T[:, :, None]

    places = [(start, head) for start in range(0, length, step) for head in range(0, heads, few)]
    on_all_cores(tile, places, heads * length * columns, multiplies=True)


def _seen_columns(hidden: npt.NDArray[np.bool_]) -> int:
    """Return the number of columns up to the last one that a row sees; all others are hidden."""
    return int(np.flatnonzero(~hidden.all(axis=0)).max(initial=0)) + 1

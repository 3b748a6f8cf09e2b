"""Attention: with MLX, or by tiles with numpy and OpenBLAS, without storing all scores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.backend import is_on_gpu, mx
from clowder_aimage.model.compute.array_block import (
    Array,
    Floats,
    contiguous,
    is_slow,
    run_on_all_cores,
    view_memory,
)
from clowder_aimage.model.hardware import count_cores
from clowder_aimage.tensor import blas

# Bytes of attention scores at a time
MAX_SCORES = 256 * 1024 * 1024
# Scores that a core computes at a time
_SCORES = 256 * 1024
# Head dimensions for which a GPU stores no scores
_FUSED = (64, 80, 128)


def attention(
    queries: Array,
    keys: Array,
    values: Array,
    scale: float,
    mask: mx.array | None = None,
    bias: mx.array | None = None,
) -> Array:
    """Return softmax(scale * queries @ keys^T + bias) @ values.

    No more than MAX_SCORES are stored. queries: (1, length, heads, channels); keys and values:
    (1, length, fewer heads, channels), each used by as many heads; mask: (length, length), True for
    visible keys; bias, in place of a mask: (heads, length, length). Returns the shape of queries;
    these may be overwritten.
    """
    if isinstance(queries, np.ndarray):
        _attend_by_tiles(queries[0], keys[0], values[0], scale, mask, bias)
        return queries
    if is_slow(queries) and blas.is_fast():
        queries, keys, values = contiguous(queries, keys, values)
        attention(view_memory(queries), view_memory(keys), view_memory(values), scale, mask, bias)
        return queries
    _, length, heads, channels = queries.shape
    queries, keys, values = (array.transpose(0, 2, 1, 3) for array in (queries, keys, values))
    rows = length
    if not is_on_gpu() or channels not in _FUSED:
        rows = min(length, max(1, MAX_SCORES // (heads * length * queries.dtype.size)))
    compute = mx.fast.scaled_dot_product_attention
    outputs = []
    for row in range(0, length, rows):
        row_mask = None if mask is None else mask[row : row + rows]
        row_mask = row_mask if bias is None else bias[None, :, row : row + rows]
        row_queries = queries[:, :, row : row + rows]
        outputs.append(compute(row_queries, keys, values, scale=scale, mask=row_mask))
        if rows < length:
            # Lazily, MLX would compute the scores of several parts first and store them all
            mx.eval(outputs[-1])
    return mx.concatenate(outputs, axis=2).transpose(0, 2, 1, 3)


def _attend_by_tiles(
    query: Floats,
    key: Floats,
    value: Floats,
    scale: float,
    mask: mx.array | None,
    bias: mx.array | None,
) -> None:
    """Overwrite the queries: some rows of few heads at a time, whose scores stay in the cache.

    All are (length, heads, channels), whose channels are adjacent.
    """
    length, heads, _ = query.shape
    columns, groups = key.shape[:2]
    hidden = None if mask is None else np.logical_not(view_memory(*contiguous(mask)))
    added = None if bias is None else view_memory(*contiguous(bias))
    most = columns if hidden is None else _count_seen_columns(hidden)
    step = min(max(16, _SCORES // most), -(-length // count_cores()))
    # Heads of a tile
    few = max(1, _SCORES // (step * most))

    def tile(tile_start: tuple[int, int]) -> None:
        start, first_head = tile_start
        tile_queries = query[start : start + step, first_head : first_head + few]
        rows = slice(start, start + len(tile_queries))
        visible = columns if hidden is None else _count_seen_columns(hidden[rows])
        scores = np.empty((tile_queries.shape[1], len(tile_queries), visible), dtype=np.float32)
        shared = [head * groups // heads for head in range(first_head, first_head + len(scores))]
        for head, group in enumerate(shared):
            blas.multiply(tile_queries[:, head], key[:visible, group].T, scores[head], scale)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden[rows, :visible])
        if added is not None:
            scores += added[first_head : first_head + len(scores), rows]
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        sums = scores.sum(axis=2)
        # The result overwrites these queries: no later tile reads them
        for head, group in enumerate(shared):
            blas.multiply(scores[head], value[:visible, group], tile_queries[:, head])
        tile_queries /= sums.T[:, :, None]

    tile_starts = [
        (start, head) for start in range(0, length, step) for head in range(0, heads, few)
    ]
    run_on_all_cores(tile, tile_starts, heads * length * columns, multiplies=True)


def _count_seen_columns(hidden: npt.NDArray[np.bool_]) -> int:
    """Return the number of columns up to the last one that a row sees; all others are hidden."""
    return int(np.flatnonzero(~hidden.all(axis=0)).max(initial=0)) + 1

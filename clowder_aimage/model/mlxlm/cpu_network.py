"""Networks of mlx-lm in float32 on a CPU: MLX multiplies 30 times as slowly as OpenBLAS there.

Linear layers and embeddings are replaced by subclasses with the same parameters, and the attention
function that a module of mlx-lm imports by one that computes the same. Quantized layers, other
types and GPUs keep MLX's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from clowder_aimage.model import backend
from clowder_aimage.model.backend import mx
from clowder_aimage.model.compute.array_block import is_slow, run_on_all_cores, view_memory
from clowder_aimage.model.compute.operation import linear
from clowder_aimage.model.hardware import count_cores
from clowder_aimage.model.mlxlm.joined_cache import JoinedLayer, attend_by_text
from clowder_aimage.model.mlxlm.library import import_library_module
from clowder_aimage.model.mlxlm.rotary_angles import share_angles
from clowder_aimage.tensor import blas

_NAME = "scaled_dot_product_attention"
# That a core computes at a time
_SCORES = 128 * 1024
# Rows of a product that are few: the tokens of several texts, or of a short prompt
_FEW = 64
# Products; MLX does fewer in the time in which it is waited for
_LEAST = 1 << 18
Attention = Callable[..., mx.array]


class TextLinear(backend.Linear):
    """``mlx.nn.Linear`` with a fast BLAS, also for one token at a time."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return x @ weight^T + bias. x: (..., inputs)."""
        if x.size < self["_least"]:
            bias: mx.array | None = self.get("bias")
            transposed: mx.array = self["_transposed"]
            return x @ transposed if bias is None else mx.addmm(bias, x, transposed)
        return project(x, self.weight, self.get("bias"))


class TiedEmbedding(backend.Embedding):
    """``mlx.nn.Embedding`` whose table is multiplied by a fast BLAS, for logits."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Return x @ weight^T. x: (..., width)."""
        if x.size < self["_least"]:
            transposed: mx.array = self["_transposed"]
            return x @ transposed
        return project(x, self.weight, None)


class TextNorm(backend.RMSNorm):
    """``mlx.nn.RMSNorm`` with two thirds of the operations: the mean is a part of the weight."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return x / sqrt(mean(x^2) + eps) * weight. x: (..., width)."""
        length = mx.rsqrt(mx.square(x).sum(axis=-1, keepdims=True) + self["_added"])
        scaled: mx.array = self["_scaled"]
        return x * length * scaled


def project(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """Return x @ weight^T + bias. x: (..., inputs); weight: (outputs, inputs).

    numpy multiplies a matrix and one vector three times as fast as a product of matrices does.
    """
    rows = x.size // x.shape[-1]
    if not is_slow(x) or rows * weight.size < _LEAST:
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
    if rows > _FEW:
        product: mx.array = linear(x, weight, bias)
        return product
    mx.eval(x, weight)
    if rows == 1:
        result = view_memory(weight) @ view_memory(x).reshape(-1)
    else:
        result = _multiply_few(view_memory(x).reshape(rows, -1), view_memory(weight))
    if bias is not None:
        result += view_memory(bias)
    return mx.array(result).reshape(*x.shape[:-1], len(weight))


def _multiply_few(x: Any, weight: Any) -> Any:
    """Return x @ weight^T. x: (rows, inputs), few rows: BLAS arranges the left matrix only."""
    product = np.empty((len(weight), len(x)), np.float32)
    blas.use_cores(count_cores())
    blas.multiply(weight, _to_contiguous_rows(x).T, product)
    return np.ascontiguousarray(product.T)


def accelerate(network: Any) -> None:
    """Replace the slow parts of a loaded network, if it computes in float32 on a CPU.

    The attention is replaced on all devices: it also takes several texts.
    """
    for name in {type(module).__module__ for module in network.modules()}:
        _replace_attention(name)
    if backend.is_on_gpu():
        return
    share_angles(network)
    if not blas.is_fast():
        return
    for module in network.modules():
        # the class alone changes: parameters, and the names of layers, stay
        if type(module) is backend.Linear:
            module.__class__ = TextLinear
        elif type(module) is backend.Embedding:
            module.__class__ = TiedEmbedding
        elif type(module) is backend.RMSNorm and module.weight.dtype == mx.float32:
            module.__class__ = TextNorm
            size = module.weight.size
            module["_scaled"] = module.weight[None, None] * size**0.5
            module["_added"] = mx.full((1, 1, 1), size * module.eps)
            mx.eval(module["_scaled"], module["_added"])
            continue
        else:
            continue
        # the same memory, seen once and not for each token; no parameters, as the names say
        module["_transposed"] = module.weight.T
        module["_least"] = -(-_LEAST // len(module.weight))
        mx.eval(module["_transposed"])


def _replace_attention(name: str) -> None:
    module = sys.modules.get(name)
    original: Any = import_library_module("models.base").scaled_dot_product_attention
    if module is not None and getattr(module, _NAME, None) is original:
        vars(module)[_NAME] = _wrap_attention(original)


def _wrap_attention(original: Any) -> Attention:
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any = None,
        sinks: Any = None,
    ) -> mx.array:
        if isinstance(cache, JoinedLayer):
            options = {"scale": scale, "mask": mask, "sinks": sinks}
            return attend_by_text(attention, queries, keys, values, cache, **options)
        is_plain = isinstance(keys, mx.array) and not hasattr(cache, "bits") and sinks is None
        is_small = is_plain and queries.size * keys.shape[2] < _LEAST
        is_fast = is_small or not is_slow(queries) or not blas.is_fast()
        if not is_plain or is_fast or len(queries) > 1:
            usual: mx.array = original(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
            return usual
        return attend(queries, keys, values, scale, mask)

    return attention


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any = None
) -> mx.array:
    """Return softmax(scale * queries @ keys^T + mask) @ values.

    queries: (1, heads, length, channels); keys and values: (1, fewer heads, columns, channels),
    each used by as many heads. mask: None; "causal", for queries that are the last columns; or an
    array that broadcasts to (1, heads, length, columns): True where a key is seen, or added.
    """
    mask_array = mask if isinstance(mask, mx.array) else None
    mx.eval(queries, keys, values, *([] if mask_array is None else [mask_array]))
    query, key, value = view_memory(queries)[0], view_memory(keys)[0], view_memory(values)[0]
    heads, length, _ = query.shape
    groups, columns, channels = value.shape
    result = np.empty((1, length, heads, channels), dtype=np.float32)
    step = max(1, min(length, _SCORES // columns))
    added = None if mask_array is None else _broadcast(mask_array, heads, length, columns)
    is_causal = mask == "causal" if isinstance(mask, str) else False

    def tile(index: int) -> None:
        head, start = index % heads, index // heads * step
        group, stop = head * groups // heads, min(start + step, length)
        # A query does not see later columns, so their scores are not computed
        visible = columns - length + stop if is_causal else columns
        scores = np.empty((stop - start, visible), dtype=np.float32)
        blas.multiply(
            _to_contiguous_rows(query[head, start:stop]),
            _to_contiguous_rows(key[group, :visible]).T,
            scores,
            scale,
        )
        if is_causal and stop - start > 1:
            hidden = np.triu(np.ones((stop - start, stop - start), bool), 1)
            scores[:, visible - (stop - start) :][hidden] = -np.inf
        if added is not None:
            bias = added[head, start:stop, :visible]
            if bias.dtype == np.bool_:
                np.copyto(scores, -np.inf, where=~bias)
            else:
                scores += bias
        # Exponentials of differences from the maximum cannot overflow
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        sums = scores.sum(axis=1, keepdims=True)
        output = result[0, start:stop, head]
        blas.multiply(scores, _to_contiguous_rows(value[group, :visible]), output)
        output /= sums

    tiles = range(heads * -(-length // step))
    run_on_all_cores(tile, tiles, heads * length * columns, multiplies=True)
    blas.use_cores(count_cores())
    return mx.array(result).transpose(0, 2, 1, 3)


def _broadcast(mask: mx.array, heads: int, length: int, columns: int) -> Any:
    values = np.array(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32))
    while values.ndim > 3:
        values = values[0]
    return np.broadcast_to(values, (heads, length, columns))


def _to_contiguous_rows(values: Any) -> Any:
    """Return a matrix whose rows are adjacent numbers."""
    return values if values.strides[1] == values.itemsize else np.ascontiguousarray(values)

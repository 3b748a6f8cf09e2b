"""A linear layer with adapters beside its weights: y = base(x) + the changes of each adapter.

The weights stay as they are, quantized too. Low-rank changes of all adapters are one stacked pair
with a vector of scales: another strength is another vector. A Kronecker product and DoRA are
applied without the matrix of the change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import (
    Change,
    Decomposed,
    DenseChange,
    Floats,
    Hadamard,
    Kronecker,
    LowRank,
    Norm,
    Replacement,
)
from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.compute.array_block import Array, to_fastest, to_mlx
from clowder_aimage.model.compute.operation import add_low_rank, linear
from clowder_aimage.model.quantized import QuantizedLinear

# The least norm of a row: a row of zeros has no direction, and would be a division by zero
_TINY = float(np.finfo(np.float32).tiny)


class LayerInput:
    """The input of a layer, and its product with the weights, computed when needed."""

    def __init__(self, base: Any, x: mx.array, y: mx.array) -> None:
        self.base, self.x, self.y = base, x, y

    @property
    def product(self) -> mx.array:
        """Return W x, without the bias."""
        return self.y if (bias := self.base.get("bias")) is None else self.y - bias

    def scale_columns(self, factors: mx.array) -> LayerInput:
        """Return the input with each column times a factor."""
        x = self.x * factors
        return LayerInput(self.base, x, self.base(x))


class Effect(Protocol):
    """A change, ready to be applied."""

    def compute_delta(self, layer_input: LayerInput, strength: float) -> Array:
        """Return the delta of the layer's output."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PairEffect:
    """scale * up @ down: ``down`` is (rank, in), ``up`` (out, rank)."""

    down: mx.array
    up: mx.array
    scale: float

    def compute_delta(self, layer_input: LayerInput, strength: float) -> Array:
        middle = linear(layer_input.x, self.down, None) * (strength * self.scale)
        return linear(middle, self.up, None)


@dataclass(frozen=True, slots=True, eq=False)
class MatrixEffect:
    """The matrix of a change; ``is_whole`` replaces the weights."""

    matrix: mx.array
    is_whole: bool = False

    def compute_delta(self, layer_input: LayerInput, strength: float) -> Array:
        product = linear(layer_input.x, self.matrix, None)
        return strength * (product - layer_input.product if self.is_whole else product)


@dataclass(frozen=True, slots=True, eq=False)
class KroneckerEffect:
    """Rows ``start`` to ``stop`` of scale * kron(first, second)."""

    first: mx.array
    second: mx.array
    scale: float
    start: int
    stop: int | None

    def compute_delta(self, layer_input: LayerInput, strength: float) -> Array:
        x = layer_input.x
        # (A (x) B) x is A X B^T for x as a matrix X: the product itself is never built
        split = x.reshape(*x.shape[:-1], self.first.shape[1], self.second.shape[1])
        inner = linear(split, self.second, None).swapaxes(-1, -2)
        outer = linear(inner, self.first, None).swapaxes(-1, -2)
        rows = outer.reshape(*x.shape[:-1], -1)[..., self.start : self.stop]
        return rows * (strength * self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class DecomposedEffect:
    """DoRA. The norms of W + t D follow from three vectors: |W|^2, W . D and |D|^2."""

    parts: tuple[Effect, ...]
    norm: Norm
    magnitude: Floats
    # Of rows: squares if CHANGED; the divisors if ROWS or COLUMNS
    weight_norms: Floats
    products: Floats
    squares: Floats

    def compute_delta(self, layer_input: LayerInput, strength: float) -> Array:
        kind = layer_input.y.dtype
        if self.norm is Norm.COLUMNS:
            scaled_input = layer_input.scale_columns(
                mx.array(self.magnitude / self.weight_norms).astype(kind)
            )
            return strength * (
                scaled_input.product - layer_input.product + self._sum_deltas(scaled_input)
            )
        if self.norm is Norm.CHANGED:
            t = np.float32(strength)
            # |W + t D|^2, row by row, without another pass over the weights
            squares = self.weight_norms + 2 * t * self.products + t * t * self.squares
            factor = self.magnitude / np.sqrt(np.maximum(squares, _TINY))
            base_factor, delta_factor = factor - 1, factor * t
        else:
            factor = self.magnitude / self.weight_norms
            base_factor, delta_factor = strength * (factor - 1), strength * factor
        base_factors = mx.array(base_factor.astype(np.float32)).astype(kind)
        delta_factors = mx.array(delta_factor.astype(np.float32)).astype(kind)
        deltas = self._sum_deltas(layer_input)
        return base_factors * layer_input.product + delta_factors * deltas

    def _sum_deltas(self, layer_input: LayerInput) -> Array:
        total = self.parts[0].compute_delta(layer_input, 1.0)
        for effect in self.parts[1:]:
            total = total + effect.compute_delta(layer_input, 1.0)
        return total


class AdaptedLinear(Network):
    """A linear layer, quantized or not, with effects and the strength of each.

    ``extra_bias`` is added to the output, if it is not None.
    """

    def __init__(
        self, base: Any, uses: Sequence[tuple[Effect, float]], extra_bias: mx.array | None
    ) -> None:
        super().__init__()
        self.base, self.extra_bias = base, extra_bias
        pairs = [(effect, t) for effect, t in uses if isinstance(effect, PairEffect)]
        self.others = [(effect, t) for effect, t in uses if not isinstance(effect, PairEffect)]
        self.pair: tuple[mx.array, mx.array, mx.array] | None = None
        if pairs:
            downs, ups = [pair.down for pair, _ in pairs], [pair.up for pair, _ in pairs]
            scales = [np.full(len(pair.down), t * pair.scale, np.float32) for pair, t in pairs]
            self.pair = (
                downs[0] if len(downs) == 1 else mx.concatenate(downs),
                ups[0] if len(ups) == 1 else mx.concatenate(ups, axis=1),
                mx.array(np.concatenate(scales)).astype(downs[0].dtype),
            )

    def __call__(self, x: Array) -> Array:
        """Return the layer's output for x: (..., inputs)."""
        if isinstance(x, np.ndarray) and (self.others or self.extra_bias is not None):
            # Effects other than pairs have no fast form for numpy
            return to_fastest(self(to_mlx(x)))
        y = self.base(x)
        layer_input = LayerInput(self.base, x, y)
        for effect, strength in self.others:
            y = y + effect.compute_delta(layer_input, strength)
        if self.extra_bias is not None:
            y = y + self.extra_bias
        return y if self.pair is None else add_low_rank(y, x, *self.pair)

    @property
    def bias(self) -> mx.array:
        """The bias of the base."""
        bias: mx.array = self.base.bias
        return bias


def prepare(change: Change, layer: Any, dtype: mx.Dtype) -> Effect:
    """Return the effect of ``change`` on a linear layer, with arrays in ``dtype``."""

    def cast(values: Floats) -> mx.array:
        return mx.array(values).astype(dtype)

    match change:
        # A pair of high rank takes more work than its product
        case LowRank() if change.rank * sum(change.shape) > math.prod(change.shape):
            return MatrixEffect(cast(dense.compute_delta(change)))
        case LowRank():
            return PairEffect(cast(change.down), cast(change.up), change.scale)
        case Hadamard():
            return prepare(_pair(change) or DenseChange(dense.compute_delta(change)), layer, dtype)
        case Kronecker():
            left, right = dense.expand_factor(change.first), dense.expand_factor(change.second)
            bounds = (change.scale, change.start, change.stop)
            return KroneckerEffect(cast(left), cast(right), *bounds)
        case DenseChange():
            return MatrixEffect(cast(change.values))
        case Replacement():
            return MatrixEffect(cast(change.values), is_whole=True)
        case Decomposed():
            return _decompose(change, layer, dtype)


def _pair(change: Hadamard) -> LowRank | None:
    """Return LoHa as a pair of rank r^2, or None if its matrix takes less work.

    The product by element of two products is the product of all pairs of their columns and rows.
    """
    (out, columns), left, right = change.shape, change.first, change.second
    rank = left.rank * right.rank
    if rank * (out + columns) > out * columns // 2:
        return None
    down = (left.down[:, None] * right.down[None]).reshape(rank, columns)
    up = (left.up[:, :, None] * right.up[:, None]).reshape(out, rank)
    return LowRank(down, up, change.scale)


def _decompose(change: Decomposed, layer: Any, dtype: mx.Dtype) -> DecomposedEffect:
    parts = tuple(prepare(inner_change, layer, dtype) for inner_change in change.changes)
    weight, sums = dequantize_weights(layer), dense.sum_changes(change.changes)
    products = squares = np.empty(0, np.float32)
    if change.norm is Norm.CHANGED:
        norms = np.einsum("ij,ij->i", weight, weight)
        products = np.einsum("ij,ij->i", weight, sums)
        squares = np.einsum("ij,ij->i", sums, sums)
    elif change.norm is Norm.ROWS:
        norms = dense.compute_norms(weight, 1) + dense.EPSILON
    else:
        norms = dense.compute_norms(weight + sums, 0) + dense.EPSILON
    return DecomposedEffect(
        parts, change.norm, change.magnitude, norms.astype(np.float32), products, squares
    )


def dequantize_weights(layer: Any) -> Floats:
    """Return the weights of a linear layer, dequantized, in float32."""
    if isinstance(layer, QuantizedLinear):
        weight = layer.array.dequantize(mx.float32)
    else:
        weight = layer.weight.astype(mx.float32)
    return np.array(weight)

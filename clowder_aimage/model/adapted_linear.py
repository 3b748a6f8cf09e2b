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
from clowder_aimage.model.quantized import QuantizedArray, QuantizedLinear

_TINY = float(np.finfo(np.float32).tiny)  # of a row that is zero: no magnitude can turn it


class LayerInput:
    """The input of a layer, and its product with the weights, computed when needed."""

    def __init__(self, base: Any, x: mx.array, y: mx.array) -> None:
        self.base, self.x, self.y = base, x, y

    @property
    def product(self) -> mx.array:
        """Return W x, without the bias."""
        return self.y if (bias := self.base.get("bias")) is None else self.y - bias

    def scaled(self, factors: mx.array) -> LayerInput:
        """Return the input with each column times a factor."""
        x = self.x * factors
        return LayerInput(self.base, x, self.base(x))


class Effect(Protocol):
    """A change, ready to be applied."""

    def added(self, given: LayerInput, strength: float) -> Array:
        """Return what the change adds to the layer's output."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PairEffect:
    """scale * up @ down: ``down`` is (rank, in), ``up`` (out, rank)."""

    down: mx.array
    up: mx.array
    scale: float

    def added(self, given: LayerInput, strength: float) -> Array:
        middle = linear(given.x, self.down, None) * (strength * self.scale)
        return linear(middle, self.up, None)


@dataclass(frozen=True, slots=True, eq=False)
class MatrixEffect:
    """The matrix of a change; ``is_whole`` replaces the weights."""

    matrix: mx.array
    is_whole: bool = False

    def added(self, given: LayerInput, strength: float) -> Array:
        product = linear(given.x, self.matrix, None)
        return strength * (product - given.product if self.is_whole else product)


@dataclass(frozen=True, slots=True, eq=False)
class KroneckerEffect:
    """Rows ``start`` to ``stop`` of scale * kron(first, second)."""

    first: mx.array
    second: mx.array
    scale: float
    start: int
    stop: int | None

    def added(self, given: LayerInput, strength: float) -> Array:
        x = given.x
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
    weight_norms: Floats  # of rows: squares if CHANGED; the divisors if ROWS or COLUMNS
    products: Floats
    squares: Floats

    def added(self, given: LayerInput, strength: float) -> Array:
        kind = given.y.dtype
        if self.norm is Norm.COLUMNS:
            turned = given.scaled(mx.array(self.magnitude / self.weight_norms).astype(kind))
            return strength * (turned.product - given.product + self._moved(turned))
        if self.norm is Norm.CHANGED:
            t = np.float32(strength)
            squares = self.weight_norms + 2 * t * self.products + t * t * self.squares
            factor = self.magnitude / np.sqrt(np.maximum(squares, _TINY))
            own, other = factor - 1, factor * t
        else:
            factor = self.magnitude / self.weight_norms
            own, other = strength * (factor - 1), strength * factor
        own_part = mx.array(own.astype(np.float32)).astype(kind) * given.product
        return own_part + mx.array(other.astype(np.float32)).astype(kind) * self._moved(given)

    def _moved(self, given: LayerInput) -> Array:
        total = self.parts[0].added(given, 1.0)
        for part in self.parts[1:]:
            total = total + part.added(given, 1.0)
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
            return to_fastest(self(to_mlx(x)))
        y = self.base(x)
        given = LayerInput(self.base, x, y)
        for effect, strength in self.others:
            y = y + effect.added(given, strength)
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

    def typed(values: Floats) -> mx.array:
        return mx.array(values).astype(dtype)

    match change:
        case LowRank() if change.rank * sum(change.shape) > math.prod(change.shape):
            return MatrixEffect(typed(dense.delta(change)))
        case LowRank():
            return PairEffect(typed(change.down), typed(change.up), change.scale)
        case Hadamard():
            return prepare(_pair(change) or DenseChange(dense.delta(change)), layer, dtype)
        case Kronecker():
            first, second = dense.matrix(change.first), dense.matrix(change.second)
            place = (change.scale, change.start, change.stop)
            return KroneckerEffect(typed(first), typed(second), *place)
        case DenseChange():
            return MatrixEffect(typed(change.values))
        case Replacement():
            return MatrixEffect(typed(change.values), is_whole=True)
        case Decomposed():
            return _decomposed(change, layer, dtype)


def _pair(change: Hadamard) -> LowRank | None:
    """Return LoHa as a pair of rank r^2, or None if its matrix takes less work.

    The product by element of two products is the product of all pairs of their columns and rows.
    """
    (out, columns), first, second = change.shape, change.first, change.second
    rank = first.rank * second.rank
    if rank * (out + columns) > out * columns // 2:
        return None
    down = (first.down[:, None] * second.down[None]).reshape(rank, columns)
    up = (first.up[:, :, None] * second.up[:, None]).reshape(out, rank)
    return LowRank(down, up, change.scale)


def _decomposed(change: Decomposed, layer: Any, dtype: mx.Dtype) -> DecomposedEffect:
    parts = tuple(prepare(part, layer, dtype) for part in change.changes)
    weight, sums = weights(layer), dense.difference(change.changes)
    products = squares = np.empty(0, np.float32)
    if change.norm is Norm.CHANGED:
        own = np.einsum("ij,ij->i", weight, weight)
        products = np.einsum("ij,ij->i", weight, sums)
        squares = np.einsum("ij,ij->i", sums, sums)
    elif change.norm is Norm.ROWS:
        own = dense.norms(weight, 1) + dense.EPSILON
    else:
        own = dense.norms(weight + sums, 0) + dense.EPSILON
    return DecomposedEffect(
        parts, change.norm, change.magnitude, own.astype(np.float32), products, squares
    )


def weights(layer: Any) -> Floats:
    """Return the weights of a linear layer, dequantized, in float32."""
    if isinstance(layer, QuantizedLinear):
        codes = QuantizedArray(
            layer.quantization,
            layer.weight,
            layer.scales,
            layer.get("biases"),
            layer.get("global_scale"),
        )
        weight = codes.dequantized(mx.float32)
    else:
        weight = layer.weight.astype(mx.float32)
    return np.array(weight)

"""Quantized weights in MLX, and their layers.

MLX's own quantized layers quantize random weights first, and do not support a global factor; these
use stored weights. Sums and products have the type of the input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clowder_aimage.model.backend import Embedding, Linear, Network, is_on_cuda, mx
from clowder_aimage.model.compute.array_block import Array, to_fastest, to_mlx
from clowder_aimage.model.dequantize import compute_factor_shape
from clowder_aimage.tensor import Quantization

# Rows of an input that CUDA multiplies with codes. With 1,056 rows and 3,840 columns MLX 0.32 did
# not return within 45 s; to dequantize first took 0.17 ms
MAX_CUDA_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedArray:
    """Codes (rows, words), scales and biases (rows, groups), and factors: one, or one per row.

    A stack of matrices has one more dimension, and may have one factor per matrix.
    """

    quantization: Quantization
    weight: mx.array
    scales: mx.array
    biases: mx.array | None = None
    global_scale: mx.array | None = None

    @property
    def parts(self) -> dict[str, mx.array]:
        """Return the arrays by their parameter names in a quantized layer."""
        names = ("weight", "scales", "biases", "global_scale")
        every = {name: getattr(self, name) for name in names}
        return {name: value for name, value in every.items() if value is not None}

    def cast(self, dtype: mx.Dtype | None) -> QuantizedArray:
        """Return the array with affine scales and biases in ``dtype``.

        MLX multiplies in the widest type of input and scales: float32 scales make a bfloat16
        product slow.
        """
        if self.biases is None or dtype is None:
            return self
        return replace(self, scales=self.scales.astype(dtype), biases=self.biases.astype(dtype))

    def dequantize(self, dtype: mx.Dtype | None = None) -> mx.array:
        """Return the values (rows, columns) in ``dtype``, computed in float32.

        None selects the type of affine scales, otherwise bfloat16.
        """
        affine = self.biases is not None
        if dtype is None:
            dtype = self.scales.dtype if affine else mx.bfloat16
        values: mx.array = mx.dequantize(
            self.weight,
            self.scales.astype(mx.float32) if affine else self.scales,
            None if self.biases is None else self.biases.astype(mx.float32),
            dtype=mx.float32,
            **_build_keywords(self.quantization),
        )
        if self.global_scale is not None:
            factor = compute_factor_shape(self.global_scale.shape, values.ndim)
            values = values * self.global_scale.reshape(factor)
        return values.astype(dtype)


class _QuantizedLayer(Network):
    def __init__(self, weights: QuantizedArray) -> None:
        super().__init__()
        self.quantization = weights.quantization
        for name, value in weights.parts.items():
            setattr(self, name, value)


class QuantizedLinear(_QuantizedLayer):
    """A linear layer with quantized weights; inputs and outputs are as for ``Linear``.

    On CUDA, the product with many rows is that of the dequantized weights.
    """

    def __init__(self, weights: QuantizedArray, bias: mx.array | None) -> None:
        super().__init__(weights)
        if bias is not None:
            self.bias = bias

    @property
    def array(self) -> QuantizedArray:
        """The weights."""
        others = self.get("biases"), self.get("global_scale")
        return QuantizedArray(self.quantization, self.weight, self.scales, *others)

    def __call__(self, x: Array) -> Array:
        if isinstance(x, np.ndarray):
            return to_fastest(self(to_mlx(x)))
        y: mx.array
        if x.size > MAX_CUDA_ROWS * x.shape[-1] and is_on_cuda():
            y = x @ self.array.dequantize(x.dtype).T
            return y + self.bias if "bias" in self else y
        y = mx.quantized_matmul(
            x,
            self.weight,
            scales=self.scales,
            biases=self.get("biases"),
            transpose=True,
            **_build_keywords(self.quantization),
        )
        if "global_scale" in self:
            y = y * self.global_scale.reshape(-1)
        y = y.astype(x.dtype)
        return y + self.bias if "bias" in self else y


class QuantizedEmbedding(_QuantizedLayer):
    """An embedding with a quantized table; outputs are in ``dtype``."""

    def __init__(self, weights: QuantizedArray, dtype: mx.Dtype) -> None:
        super().__init__(weights)
        self.dtype = dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        selected = QuantizedArray(
            self.quantization,
            self.weight[tokens],
            self.scales[tokens],
            self.biases[tokens] if "biases" in self else None,
            self._select_factors(tokens),
        )
        return selected.dequantize(self.dtype)

    def _select_factors(self, tokens: mx.array) -> mx.array | None:
        if "global_scale" not in self:
            return None
        factors: mx.array = self.global_scale.reshape(-1)
        return factors if factors.size == 1 else factors[tokens]


def build_quantized_layer(old: Network, weights: QuantizedArray, dtype: mx.Dtype | None) -> Network:
    """Return the quantized layer that replaces ``old``, a linear layer or an embedding."""
    if isinstance(old, Linear):
        return QuantizedLinear(weights, old.get("bias"))
    assert isinstance(old, Embedding)  # noqa: S101 - checked by ``apply``
    return QuantizedEmbedding(weights, dtype or mx.bfloat16)


def _build_keywords(quantization: Quantization) -> dict[str, Any]:
    kind = quantization.type
    return {"group_size": quantization.group_size, "bits": kind.bits, "mode": kind.mode}

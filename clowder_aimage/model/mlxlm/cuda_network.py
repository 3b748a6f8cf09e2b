"""Networks of mlx-lm on CUDA: many rows are multiplied with dequantized weights.

As ``model/quantized.py`` has it for the networks of this package.
"""

from __future__ import annotations

from typing import Any

from clowder_aimage.model.backend import QuantizedLayer, is_on_cuda, mx
from clowder_aimage.model.quantized import MAX_CUDA_ROWS


class CudaLinear(QuantizedLayer):
    """``mlx.nn.QuantizedLinear`` that dequantizes its weights for an input of many rows."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return x @ weight^T + bias. x: (..., inputs)."""
        if x.size <= MAX_CUDA_ROWS * x.shape[-1]:
            product: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return product
        weight = mx.dequantize(
            self["weight"],
            self["scales"],
            self.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=x.dtype,
        )
        y = x @ weight.T
        return y + self["bias"] if "bias" in self else y


def adapt_to_cuda(network: Any) -> None:
    """Replace the class of all quantized linear layers if MLX computes on CUDA."""
    if not is_on_cuda():
        return
    for _, layer in network.named_modules():
        if type(layer) is QuantizedLayer:
            layer.__class__ = CudaLinear

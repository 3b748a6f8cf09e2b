"""The only module that imports MLX, after a search for a fast BLAS.

``BLAS`` is the name of the library that was found, "openblas", or None. All MLX work must
run on one thread: a lazy array can be evaluated only on the thread that created it.
"""

from __future__ import annotations

from clowder_aimage.tensor import blas

BLAS = blas.preload()

import mlx.core as mx  # noqa: E402
from mlx.nn.layers import convolution  # noqa: E402
from mlx.nn.layers.base import Module  # noqa: E402
from mlx.nn.layers.embedding import Embedding  # noqa: E402
from mlx.nn.layers.linear import Linear  # noqa: E402
from mlx.nn.layers.normalization import GroupNorm, LayerNorm, RMSNorm  # noqa: E402
from mlx.nn.layers.quantized import QuantizedLinear as QuantizedLayer  # noqa: E402
from mlx.nn.layers.quantized import quantize as quantize_layers  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from clowder_aimage.model.library_choice import SLOW, choose_dtype_name  # noqa: E402

__all__ = [
    "BLAS",
    "Conv2d",
    "Embedding",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "Network",
    "QuantizedLayer",
    "RMSNorm",
    "choose_dtype",
    "describe",
    "is_on_cuda",
    "is_on_gpu",
    "mx",
    "quantize_layers",
    "resolve_dtype_name",
    "tree_flatten",
]

# Bytes; larger blocks are returned to the system and cleared again by it each time
STRIP = 1 << 25
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


class Network(Module):
    """``mlx.nn.Module`` with type annotations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class Conv2d(convolution.Conv2d):
    """``mlx.nn.Conv2d`` for (batch, height, width, channels), channels last, in little memory.

    On a CPU, MLX copies the neighbourhood of every pixel, 9 times the input for 3 by 3: so the rows
    are computed in strips of at most STRIP bytes.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Convolve x; strips are for a stride of 1 and padding that keeps the size."""
        _, height, width, channels = x.shape
        outputs, side, _, _ = self.weight.shape
        rows = max(1, STRIP // (width * side * side * channels * x.dtype.size))
        if rows >= height or side == 1 or is_on_gpu():
            output: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return output
        edge = side // 2
        result = mx.zeros((1, height, width, outputs), x.dtype)
        mx.eval(x, result)
        for top in range(0, height, rows):
            bottom = min(height, top + rows)
            above, below = max(0, top - edge), min(height, bottom + edge)
            padding = ([edge - (top - above), edge], [edge - (below - bottom), edge])
            strip = mx.conv_general(x[:, above:below], self.weight, padding=padding)
            result[:, top:bottom] = strip + self.bias if "bias" in self else strip
            # Evaluated in place: otherwise all strips would be in memory at once
            mx.eval(result)
        return result


def is_on_gpu() -> bool:
    """Return True if MLX computes on a GPU (Metal or CUDA)."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def is_on_cuda() -> bool:
    """Return True if MLX computes on a GPU of NVIDIA."""
    # Older versions lack the module
    cuda = getattr(mx, "cuda", None)
    return is_on_gpu() and cuda is not None and bool(cuda.is_available())


def resolve_dtype_name(name: str | None) -> str:
    """Return the full name of the compute type. Raises as ``type_name`` does."""
    return choose_dtype_name(name, is_gpu=is_on_gpu())


def choose_dtype(name: str | None) -> mx.Dtype:
    """Return MLX's type for a name. Raises as ``dtype_name`` does."""
    return DTYPES[resolve_dtype_name(name)]


def describe() -> str:
    """Return ``gpu``, or the CPU with its BLAS: ``cpu (openblas)``, or SLOW without a fast one."""
    return "gpu" if is_on_gpu() else f"cpu ({BLAS})" if BLAS else SLOW


def get_device_memory() -> int | None:
    """Return the usable memory of the GPU in bytes, or None if unknown or without a GPU.

    Source: MLX, ``device_info``: Metal reports a recommended size, CUDA the total.
    """
    if not is_on_gpu():
        return None
    info = mx.device_info()
    if advised := int(info.get("max_recommended_working_set_size", 0)):
        return advised
    total = int(info.get("total_memory", 0) or info.get("memory_size", 0))
    return total * 9 // 10 or None

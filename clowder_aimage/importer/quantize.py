"""Rows of weights quantized by MLX, on the CPU and on one thread.

On the CPU, because its codes are the same on every machine (a GPU rounds ties the other way); on
one thread, because MLX's lazy arrays cannot cross threads. Rows do not depend on one another, so a
matrix is quantized in blocks of rows, and never has to be in memory as a whole. What comes back is
evaluated and copied out of MLX: plain bytes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, cast

import mlx.core as mx

from clowder_aimage.tensor import Quantization

_CACHE = 32 * 1024 * 1024  # bytes that MLX may keep for the next block
_BITS = {2: mx.uint16, 4: mx.uint32, 1: mx.uint8}


class Quantizer:
    """The one thread that MLX runs on; others may share it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aimage-mlx")
        self._limit = mx.set_cache_limit(_CACHE)

    def quantize(self, rows: Any, dtype: str, quantization: Quantization) -> tuple[bytes, ...]:
        """The codes, scales and, for affine types, biases of ``rows``.

        Args:
            rows: a numpy array (rows, columns) of float16 or float32, or of the bits of BF16.
            dtype: what its values are, a word of safetensors; affine scales have it, too.
        """
        return self._thread.submit(_quantize, rows, dtype, quantization).result()

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        mx.set_cache_limit(self._limit)
        mx.clear_cache()


def _quantize(rows: Any, dtype: str, quantization: Quantization) -> tuple[bytes, ...]:
    values = mx.array(rows)
    if dtype == "BF16":
        values = values.view(mx.bfloat16, stream=mx.cpu)
    kind = quantization.type
    made = mx.quantize(
        values,
        group_size=quantization.group_size,
        bits=kind.bits,
        mode=kind.mode,
        stream=mx.cpu,
    )
    bits = [array.view(_BITS[array.itemsize], stream=mx.cpu) for array in made]  # numpy has no BF16
    mx.eval(bits)
    return tuple(bytes(memoryview(cast(Any, array))) for array in bits)

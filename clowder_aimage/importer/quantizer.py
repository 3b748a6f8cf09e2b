"""Groups of weights quantized by MLX, on the CPU and on one thread.

On the CPU, because its codes are the same on every machine (a GPU rounds ties the other way); on
one thread, because MLX's lazy arrays cannot cross threads. Groups do not depend on one another, so
a matrix is quantized in blocks of them, and never has to be in memory as a whole. What comes back
is evaluated and copied out of MLX: plain bytes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, cast

import numpy as np

from clowder_aimage.tensor import Quantization, blas

blas.preload()  # before MLX is imported: this process may run models later

import mlx.core as mx  # noqa: E402

_CACHE = 32 * 1024 * 1024  # bytes that MLX may keep for the next block
_LEAST = 32  # values: MLX takes multiples of that, which one group of nvfp4 is not
_BITS = {2: mx.uint16, 4: mx.uint32, 1: mx.uint8}


class Quantizer:
    """The one thread that MLX runs on, shared by the threads that write blobs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aimage-mlx")
        self._limit = mx.set_cache_limit(_CACHE)

    def quantize(self, rows: Any, dtype: str, quantization: Quantization) -> tuple[bytes, ...]:
        """Return the codes, the scales and, for affine types, the biases of ``rows``.

        Args:
            rows: A numpy array (rows, columns) of float16 or float32, or of the bits of BF16.
            dtype: The dtype of its values, a word of safetensors; affine scales have it, too.
            quantization: The type and the group size.
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
    if rest := rows.size % _LEAST:
        padded = np.append(rows, np.zeros(_LEAST - rest, rows.dtype)).reshape(1, -1)
        whole = _quantize(padded, dtype, quantization)
        return tuple(part[: len(part) * rows.size // padded.size] for part in whole)
    values = mx.array(rows)
    if dtype == "BF16":
        values = values.view(mx.bfloat16, stream=mx.cpu)
    made = mx.quantize(values, **_words(quantization), stream=mx.cpu)
    bits = [array.view(_BITS[array.itemsize], stream=mx.cpu) for array in made]  # numpy has no BF16
    mx.eval(bits)
    return tuple(bytes(memoryview(cast(Any, array))) for array in bits)


def _words(quantization: Quantization) -> dict[str, Any]:
    """Return the quantization in MLX's words."""
    kind = quantization.type
    return {"group_size": quantization.group_size, "bits": kind.bits, "mode": kind.mode}

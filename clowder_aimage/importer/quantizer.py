"""Quantization of groups of weights as MLX does it, on the CPU.

The CPU produces the same codes on every machine (a GPU rounds ties the other way). MLX itself
quantizes to the types that numpy does not faster; its lazy arrays cannot be passed between threads,
so each thread has its own. Groups are independent, so a matrix is quantized in blocks of groups and
is never completely in memory.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np

from clowder_aimage.importer.affine_quantizer import quantize_affine
from clowder_aimage.importer.e2m1_quantizer import E2M1_MODES, quantize_e2m1
from clowder_aimage.tensor import Quantization, blas

# This must precede the import of MLX: the process may run models later.
blas.preload()

import mlx.core as mx  # noqa: E402

# Bytes that MLX may cache for the next block.
_CACHE = 32 * 1024 * 1024
# MLX requires a multiple of 32 values, although a group of nvfp4 has 16.
_MULTIPLE = 32
_WORDS_OF = {2: mx.uint16, 4: mx.uint32, 1: mx.uint8}


class Quantizer:
    """The threads that quantize, shared by ``writers`` threads that write blobs: one a core."""

    def __init__(self, writers: int = 1) -> None:
        threads = max(1, min(writers, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="aimage-mlx")
        self._limit = mx.set_cache_limit(_CACHE)

    def quantize(self, rows: Any, dtype: str, quantization: Quantization) -> tuple[bytes, ...]:
        """Return the codes, the scales and, for affine types, the biases of ``rows``.

        Args:
            rows: A numpy array (rows, columns) of float16 or float32, or of the bits of BF16.
            dtype: The dtype of the values and of affine scales, as in safetensors.
            quantization: The type and the group size.
        """
        return self._threads.submit(_quantize, rows, dtype, quantization).result()

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        mx.set_cache_limit(self._limit)
        mx.clear_cache()


def _quantize(rows: Any, dtype: str, quantization: Quantization) -> tuple[bytes, ...]:
    if quantization.type.mode == "affine":
        return quantize_affine(rows, dtype, quantization)
    by_mlx = partial(_quantize_by_mlx, dtype=dtype, quantization=quantization)
    if quantization.type.mode in E2M1_MODES:
        return quantize_e2m1(rows, dtype, quantization, by_mlx)
    return by_mlx(rows)


def _quantize_by_mlx(rows: Any, dtype: str, quantization: Quantization) -> tuple[bytes, ...]:
    if remainder := rows.size % _MULTIPLE:
        padded = np.append(rows, np.zeros(_MULTIPLE - remainder, rows.dtype)).reshape(1, -1)
        outputs = _quantize_by_mlx(padded, dtype, quantization)
        return tuple(output[: len(output) * rows.size // padded.size] for output in outputs)
    values = mx.array(rows)
    if dtype == "BF16":
        values = values.view(mx.bfloat16, stream=mx.cpu)
    kind = quantization.type
    arrays = mx.quantize(
        values, group_size=quantization.group_size, bits=kind.bits, mode=kind.mode, stream=mx.cpu
    )
    # Views of integers, since numpy has no BF16.
    bits = [array.view(_WORDS_OF[array.itemsize], stream=mx.cpu) for array in arrays]
    mx.eval(bits)
    return tuple(bytes(memoryview(cast(Any, array))) for array in bits)

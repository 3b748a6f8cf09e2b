"""Groups of weights quantized by MLX, on the CPU and on one thread.

On the CPU, because its codes are the same on every machine (a GPU rounds ties the other way); on
one thread, because MLX's lazy arrays cannot cross threads. Groups do not depend on one another, so
a matrix is quantized in blocks of them, and never has to be in memory as a whole. What comes back
is evaluated and copied out of MLX: plain bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np

from clowder_aimage.tensor import Quantization, blas

blas.preload()  # before MLX is imported: this process may run models later

import mlx.core as mx  # noqa: E402

_CACHE = 32 * 1024 * 1024  # bytes that MLX may keep for the next block
_LEAST = 32  # values: MLX takes multiples of that, which one group of nvfp4 is not
_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_BITS = {2: mx.uint16, 4: mx.uint32, 1: mx.uint8}


class QuantizedGroup(NamedTuple):
    """Codes, scales and, for affine types, biases; ``restored`` are float32 (groups, values)."""

    parts: tuple[bytes, ...]
    restored: Any


class Quantizer:
    """The one thread that MLX runs on; others may share it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aimage-mlx")
        self._limit = mx.set_cache_limit(_CACHE)

    def quantize(
        self, rows: Any, dtype: str, quantization: Quantization, step: int = 1
    ) -> QuantizedGroup:
        """What becomes of ``rows``, and what every ``step``-th group of them stands for then.

        Args:
            rows: a numpy array (rows, columns) of float16 or float32, or of the bits of BF16.
            dtype: what its values are, a word of safetensors; affine scales have it, too.
        """
        return self._thread.submit(_both, rows, dtype, quantization, step).result()

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


def _both(rows: Any, dtype: str, quantization: Quantization, step: int) -> QuantizedGroup:
    made = _quantize(rows, dtype, quantization)
    groups = rows.size // quantization.group_size
    words = ("<u4", *(f"<u{rows.itemsize}" if quantization.type.has_bias else "u1",) * 2)
    picked = [
        np.frombuffer(part, word).reshape(groups, -1)[::step]
        for part, word in zip(made, words, strict=False)
    ]
    return QuantizedGroup(made, _dequantize(picked, dtype, quantization))


def _dequantize(parts: Sequence[Any], dtype: str, quantization: Quantization) -> Any:
    """Codes (groups, words), and bits of scales and biases (groups, 1), as values."""
    count = len(parts[0])
    if count * quantization.group_size % _LEAST:
        parts = [np.append(part, part[:1], axis=0) for part in parts]
    codes, scales, *biases = (mx.array(np.ascontiguousarray(part)) for part in parts)
    if quantization.type.has_bias:
        scales, *biases = (
            part.view(_FLOATS[dtype], stream=mx.cpu).astype(mx.float32, stream=mx.cpu)
            for part in (scales, *biases)
        )
    values = mx.dequantize(
        codes,
        scales,
        biases[0] if biases else None,
        **_words(quantization),
        dtype=mx.float32,
        stream=mx.cpu,
    )
    mx.eval(values)
    return np.array(values)[:count]


def _words(quantization: Quantization) -> dict[str, Any]:
    """The quantization in MLX's words."""
    kind = quantization.type
    return {"group_size": quantization.group_size, "bits": kind.bits, "mode": kind.mode}

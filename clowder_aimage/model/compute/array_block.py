"""Blocks of arrays in numpy, on all cores: for float32 on a CPU.

There MLX computes an operation on one thread, its exponential is scalar code, 13 ns per element on
x86, and its compiled functions require a C++ compiler. numpy's exponential is vectorized, 0.5 ns.
Networks convert their input to numpy's arrays (``to_fastest``) and compute with them, in blocks
that stay in the processor's cache; elsewhere with MLX's. Their shapes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.backend import is_on_gpu, mx
from clowder_aimage.model.hardware import count_cores
from clowder_aimage.tensor import blas

# Elements that a core computes at a time; threads of Python disturb each other
_BLOCK = 128 * 1024
# Elements for which a second core is used
_LEAST = 64 * 1024

# mx.array, or numpy's in float32
Array = Any
Floats = npt.NDArray[np.float32]
T = TypeVar("T")


def is_slow(x: mx.array) -> bool:
    """Return True for float32 on a CPU."""
    return x.dtype == mx.float32 and not is_on_gpu()


def to_fastest(x: mx.array) -> Array:
    """Return the array of the library that computes with it faster: numpy if MLX is slow."""
    return view_memory(*contiguous(x)) if is_slow(x) and blas.is_fast() else x


def to_mlx(x: Array) -> mx.array:
    """Return an array of MLX; numpy's are copied."""
    return mx.array(x) if isinstance(x, np.ndarray) else x


def contiguous(*arrays: mx.array) -> list[mx.array]:
    """Return the arrays evaluated and in row order; those that are already share their memory."""
    mx.eval(arrays)
    ordered = [a if view_memory(a).flags.c_contiguous else mx.contiguous(a) for a in arrays]
    mx.eval(ordered)
    return ordered


def view_memory(x: mx.array) -> Floats:
    """Return the memory of an evaluated array, to read and to write."""
    return np.array(x, copy=False)


def run_in_blocks(compute: Callable[..., None], *arrays: npt.NDArray[Any]) -> None:
    """Call ``compute`` with slices of all arrays along their first axis, on all cores."""
    length, size = len(arrays[0]), max(array.size for array in arrays)
    step = max(1, _BLOCK * length // max(1, size))

    def run_block(start: int) -> None:
        compute(*(array[start : start + step] for array in arrays))

    run_on_all_cores(run_block, range(0, length, step), size)


def run_on_all_cores(
    compute: Callable[[T], None], items: Sequence[T], size: int, *, multiplies: bool = False
) -> None:
    """Call ``compute`` for each item, on all cores if there are many elements (``size``) in all.

    ``multiplies``: it calls the BLAS, limited to the calling core meanwhile.
    """
    # One iterator for all threads: a slower core computes fewer items
    coming = iter(items)

    def compute_items() -> None:
        # Overflows are no warning here: finished pictures are checked for NaN
        with np.errstate(all="ignore"):
            for item in coming:
                compute(item)

    count = min(count_cores(), len(items), 1 + size // _LEAST)
    if multiplies:
        blas.use_cores(1)
    futures = [_get_pool().submit(compute_items) for _ in range(count - 1)]
    try:
        compute_items()
    finally:
        for future in futures:
            future.result()


@cache
def _get_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count_cores(), thread_name_prefix="aimage-mlx-operation")

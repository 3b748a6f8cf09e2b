"""A fast BLAS on Linux, for products in float32.

The Linux CPU build of MLX carries the single-threaded reference BLAS. OpenBLAS multiplies 30 times
faster in float32: that of the package scipy-openblas32, or the system's. ``multiply`` calls it. The
system's also takes over in MLX, whose ``cblas_sgemm`` calls ``sgemm_`` through the dynamic linker,
if it is loaded with RTLD_GLOBAL before ``mlx.core``; in the package's, names have a prefix.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]

# Constants of CBLAS: row-major order, no transposition, transposition.
_ROWS, _KEEP, _TRANSPOSE = 101, 111, 112


@dataclass(frozen=True, slots=True)
class Library:
    """A BLAS: its file, and the prefix of its functions."""

    path: str
    prefix: str = ""

    def load(self) -> _Loaded | None:
        """Load the library globally; return None if that fails."""
        try:
            library = ctypes.CDLL(self.path, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
            product = getattr(library, f"{self.prefix}cblas_sgemm")
            cores = getattr(library, f"{self.prefix}openblas_set_num_threads")
            limit = getattr(library, f"{self.prefix}openblas_get_num_threads")()
        except (OSError, AttributeError):
            return None
        size, real, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        product.argtypes = [*[size] * 6, real, *[address, size] * 2, real, address, size]
        product.restype = None
        return _Loaded(product, cores, limit)


class _Loaded:
    """A loaded library. OPENBLAS_NUM_THREADS or OMP_NUM_THREADS have limited it to ``most`` cores.

    Two threads that wait for each other on a busy machine multiply four times as slowly as one.
    """

    def __init__(self, product: Any, cores: Any, limit: int) -> None:
        self.product = product
        self._set_cores, self._cores, self._limit = cores, 0, limit

    def use(self, cores: int) -> None:
        cores = min(cores, self._limit)
        if cores != self._cores:
            self._set_cores(cores)
            self._cores = cores


_library: _Loaded | None = None


def preload() -> str | None:
    """Load the best library and return its name, openblas, or None without one.

    It must run before ``import mlx.core``. It has no effect on macOS: there MLX uses Accelerate and
    Metal, or when no library can be found or loaded.
    """
    # The choice is one for the process: a BLAS loaded globally cannot be replaced.
    global _library
    if sys.platform != "linux":
        return None
    # Idle threads of OpenBLAS spin: they leave their cores to other threads after 2^16 cycles.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")
    if _library is None:
        loaded = (library.load() for library in iter_candidates())
        _library = next((library for library in loaded if library is not None), None)
    return None if _library is None else "openblas"


def iter_candidates() -> Iterator[Library]:
    """Yield the OpenBLAS of the package, then the system's, an older one."""
    package = importlib.util.find_spec("scipy_openblas32")
    for folder in (package and package.submodule_search_locations) or ():
        yield Library(f"{folder}/lib/libscipy_openblas.so", "scipy_")
    yield Library("libopenblas.so.0")


def is_fast() -> bool:
    """Return True if a library is loaded. ``multiply`` needs one."""
    return _library is not None


def use_cores(cores: int) -> None:
    """Set the number of cores of each later product: one, if several threads multiply."""
    assert _library is not None  # noqa: S101 - checked by is_fast
    _library.use(cores)


def multiply(
    left: Matrix, right: Matrix, result: Matrix, factor: float = 1, *, is_sum: bool = False
) -> None:
    """Write factor * left @ right to ``result``, or add it: float32 matrices, without copies.

    Rows of ``result`` are adjacent numbers, of ``left`` and ``right`` rows or columns. Rows may
    overlap, so that a slice of a picture is a matrix. Raises ValueError for other matrices.
    """
    assert _library is not None  # noqa: S101 - checked by is_fast
    left_order, left_distance = _describe(left)
    right_order, right_distance = _describe(right)
    order, distance = _describe(result)
    if order != _KEEP:
        raise ValueError("the rows of a result must be adjacent numbers")
    _library.product(
        *(_ROWS, left_order, right_order),
        *(len(result), result.shape[1], left.shape[1], factor),
        *(left.ctypes.data, left_distance, right.ctypes.data, right_distance),
        *(float(is_sum), result.ctypes.data, distance),
    )


def _describe(matrix: Matrix) -> tuple[int, int]:
    """Return the order of a matrix, and the distance of its rows or columns in elements.

    BLAS takes it, so that no slice has to be copied.
    """
    size, (rows, columns) = matrix.itemsize, matrix.strides
    if columns == size or matrix.shape[1] == 1:
        return _KEEP, rows // size
    if rows != size:
        raise ValueError("neither rows nor columns of a matrix are adjacent numbers")
    return _TRANSPOSE, columns // size

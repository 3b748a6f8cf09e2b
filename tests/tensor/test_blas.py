from __future__ import annotations

import sys

import numpy as np
import pytest

from clowder_aimage.tensor import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")


def fill(*shape: int) -> blas.Matrix:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


# Rows that are adjacent, columns that are, parts of other matrices, and single rows and columns
LEFT = {
    "rows": fill(5, 7),
    "columns": fill(7, 5).T,
    "part": fill(5, 9)[:, 1:8],
    "row": fill(1, 7),
    "column of a matrix": fill(7, 3)[:, 1:2].T,
}
RIGHT = {
    "rows": fill(7, 3),
    "columns": fill(3, 7).T,
    "part": fill(4, 7)[1:].T,
    "column": fill(1, 7).T,
    "column of a matrix": fill(7, 4)[:, 2:3],
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT)
def test_products_are_those_of_numpy(left: blas.Matrix, right: blas.Matrix) -> None:
    blas.preload()
    into = np.ones((len(left), right.shape[1] + 2), np.float32)[:, 1:-1]
    blas.multiply(left, right, into, 2)
    np.testing.assert_allclose(into, 2 * left @ right, rtol=1e-5, atol=1e-5)
    blas.multiply(left, right, into, is_sum=True)
    np.testing.assert_allclose(into, 3 * left @ right, rtol=1e-5, atol=1e-5)


def test_matrices_without_adjacent_numbers_are_refused() -> None:
    blas.preload()
    sparse, result = fill(8, 8)[::2, ::2], np.empty((4, 4), np.float32)
    for left, right, into in ((sparse, result, result), (result, sparse, result)):
        with pytest.raises(ValueError, match="adjacent"):
            blas.multiply(left, right, into)
    with pytest.raises(ValueError, match="adjacent"):
        blas.multiply(fill(4, 4), fill(4, 4), result.T)

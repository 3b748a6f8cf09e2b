"""Adapters are read from every dialect and kind, and changes are those of the definitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.reader import read_adapter
from tests.adapter import vectors
from tests.adapter.vectors import AdapterVector

SHAPES = vectors.tiny_shapes()
VECTORS = {one.name: one for one in vectors.vectors(SHAPES)}
assert len(VECTORS) == len(vectors.vectors(SHAPES))


def weight_of(tensor: str) -> np.ndarray:
    """Return random values for a tensor of the base; zeros for a bias that it lacks."""
    shape = SHAPES.get(tensor)
    if shape is None:
        rows = SHAPES[tensor.removesuffix("bias") + "weight"][0]
        return np.zeros(rows, np.float32)
    seed = sum(tensor.encode())
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("strength", [1.0, -0.7])
@pytest.mark.parametrize("vector", VECTORS.values(), ids=str)
def test_a_vector_is_read(vector: AdapterVector, strength: float, tmp_path: Path) -> None:
    adapter = read_adapter(vector.write(tmp_path), SHAPES, what="style", base="tiny")
    assert adapter.changes.keys() == vector.effects.keys()
    weights = {tensor: weight_of(tensor) for tensor in vector.effects}
    expected = vector.changed(weights, strength)
    for tensor, changes in adapter.changes.items():
        found = dense.changed(weights[tensor], [(change, strength) for change in changes])
        np.testing.assert_allclose(found, expected[tensor], rtol=2e-5, atol=2e-6, err_msg=tensor)

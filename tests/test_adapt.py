"""Weights that adapters change: what cannot be computed is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clowder_aimage import adapt
from clowder_aimage.errors import ModelError


def test_a_weight_of_integers_is_refused() -> None:
    weight: Any = SimpleNamespace(dtype="I32", quantization=None, shape=(1,))
    with pytest.raises(ModelError, match="layer is I32, to which no adapter can be added"):
        adapt._fuse_layer("layer", weight, lambda: np.zeros(1, np.float32))


def test_a_sum_that_is_not_finite_is_refused() -> None:
    values = {"layer": np.array([[np.inf]], np.float32)}
    with pytest.raises(ModelError, match="layer with the adapters has values that are not finite"):
        adapt._sum(values.__getitem__, "layer", [])

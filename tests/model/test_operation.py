"""Attention, activations and rotations in numpy, compared with MLX and with float64."""

from __future__ import annotations

import numpy as np
import pytest

from clowder_aimage.model import operation
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow import rope
from clowder_aimage.model.operation import attention, silu_in_place, swiglu_in_place
from clowder_aimage.tensor import blas

FLOAT32_EVERYWHERE = np.concatenate([np.linspace(-130, 130, 90_001), [0, 1e30, -1e30]])


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def test_silu() -> None:
    x = FLOAT32_EVERYWHERE.astype(np.float32)
    with np.errstate(over="ignore"):
        exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(np.array(silu_in_place(mx.array(x))), exact, rtol=4e-7, atol=1e-30)
    small = mx.array(x[abs(x) < 10]).astype(mx.bfloat16)
    assert silu_in_place(small).dtype == mx.bfloat16
    assert np.isnan(np.array(silu_in_place(mx.array([float("nan")]))))


def test_swiglu_of_arrays_in_another_order() -> None:
    gate, up = normal(300, 400), normal(400, 300)
    exact = np.array(gate, np.float64)
    exact = (exact / (1 + np.exp(-exact))).T * np.array(up)
    np.testing.assert_allclose(np.array(swiglu_in_place(gate.T, up)), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("known", [None, 5, 1000])
@pytest.mark.parametrize(
    ("length", "heads", "groups"), [(7, 2, 1), (70, 4, 4), (300, 6, 2)], ids=str
)
def test_attention_equals_mlx(length: int, heads: int, groups: int, known: int | None) -> None:
    queries, keys, values = (normal(1, length, n, 16) for n in (heads, groups, groups))
    columns = mx.arange(length)[None]  # those from ``known`` on are padding
    mask = None
    if known is not None:
        mask = (mx.arange(length)[:, None] >= columns) & (columns < known)
    whole = mx.fast.scaled_dot_product_attention(
        *(each.transpose(0, 2, 1, 3) for each in (queries, keys, values)), scale=0.5, mask=mask
    )
    expected = np.array(whole.transpose(0, 2, 1, 3))  # before the queries are overwritten
    found = attention(queries, keys, values, 0.5, mask)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


def test_attention_in_parts_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = (normal(1, 50, 2, 16) for _ in range(3))
    mask = mx.arange(50)[:, None] >= mx.arange(50)[None]
    whole = np.array(attention(mx.array(queries), keys, values, 0.5, mask))
    monkeypatch.setattr(operation, "MAX_SCORES", 50 * 2 * 4 * 3)  # three rows
    monkeypatch.setattr(operation, "_SCORES", 1)  # sixteen rows
    tiles = attention(mx.array(queries), keys, values, 0.5, mask)
    np.testing.assert_allclose(np.array(tiles), whole, atol=1e-6)
    monkeypatch.setattr(blas, "is_fast", lambda: False)
    rows = attention(mx.array(queries), keys, values, 0.5, mask)
    np.testing.assert_allclose(np.array(rows), whole, atol=1e-6)


def test_scores_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 32
    monkeypatch.setattr(operation, "MAX_SCORES", 4 * 512 * 512 * 2 // parts)  # heads, bytes
    queries, keys, values = (normal(1, 512, 4, 8).astype(mx.bfloat16) for _ in range(3))
    mx.eval(queries, keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attention(queries, keys, values, 0.5))
    arrays = 6 * queries.nbytes  # queries, keys, values, parts and results
    assert mx.get_peak_memory() - before < arrays + 4 * operation.MAX_SCORES


@pytest.mark.parametrize("rotate", [rope.rotate_pairs, rope.rotate_halves])
def test_rotations_in_place_equal_those_of_mlx(
    rotate: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(rotate)
    tables = normal(40, 8), normal(40, 8)
    given = [normal(1, 40, 3, 16), normal(1, 40, 2, 16)]
    with monkeypatch.context() as patch:
        patch.setattr(rope, "is_slow", lambda _: False)
        expected = [np.array(each) for each in rotate(given, tables)]
    for own, wanted in zip(rotate(given, tables), expected, strict=True):
        np.testing.assert_allclose(np.array(own), wanted, atol=1e-6)

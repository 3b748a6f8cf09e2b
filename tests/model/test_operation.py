"""Operations in numpy, compared with MLX and with float64."""

from __future__ import annotations

import numpy as np
import pytest

from clowder_aimage.model.adapted_linear import AdaptedLinear, Effect, MatrixEffect, PairEffect
from clowder_aimage.model.backend import mx
from clowder_aimage.model.compute import attention as attention_module
from clowder_aimage.model.compute.array_block import Array, to_fastest, to_mlx, view_memory
from clowder_aimage.model.compute.attention import attention
from clowder_aimage.model.compute.operation import (
    LayerNorm,
    Linear,
    RMSNorm,
    add,
    add_low_rank,
    modulate,
    silu,
    swiglu_in_place,
)
from clowder_aimage.model.flow import rope
from clowder_aimage.tensor import blas

FLOAT32_EVERYWHERE = np.concatenate([np.linspace(-130, 130, 90_001), [0, 1e30, -1e30]])


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def test_silu() -> None:
    x = FLOAT32_EVERYWHERE.astype(np.float32)
    with np.errstate(over="ignore"):
        exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
        np.testing.assert_allclose(silu(x), exact, rtol=4e-7, atol=1e-30)
    small = mx.array(x[abs(x) < 10]).astype(mx.bfloat16)
    assert silu(small).dtype == mx.bfloat16
    assert np.isnan(silu(np.array([float("nan")], dtype=np.float32)))


def in_numpy(x: mx.array) -> np.ndarray:
    """Return a copy in numpy, which MLX's array does not share."""
    return np.array(x)


def assert_equal(found: Array, wanted: Array) -> None:
    np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-5, atol=2e-6)


def test_networks_compute_in_numpy_where_mlx_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(3, 4)
    found = to_fastest(x.T)
    assert isinstance(found, np.ndarray)
    assert_equal(to_mlx(found), x.T)
    assert isinstance(to_fastest(x.astype(mx.bfloat16)), mx.array)
    monkeypatch.setattr(blas, "is_fast", lambda: False)
    assert to_fastest(x) is x
    assert to_mlx(x) is x


def test_memory_outlives_its_array() -> None:
    found = [view_memory(normal(100, 1000) + one) for one in range(5)]
    for one, values in enumerate(found):
        assert_equal(values, normal(100, 1000) + one)


@pytest.mark.parametrize("length", [1, 7, 700], ids=str)
def test_operations_equal_those_of_mlx(length: int) -> None:
    x, y, gate = normal(1, length, 256), normal(1, length, 256), normal(1, 1, 256)
    norm, centred = RMSNorm(256, eps=1e-6), LayerNorm(256, eps=1e-6)
    norm.weight = normal(256)
    own, other = in_numpy(x), in_numpy(gate)
    assert_equal(silu(own), silu(x))
    for each in (norm, centred):
        assert_equal(each(own), each(x))
        assert_equal(modulate(each, own, other), modulate(each, x, gate))
        assert_equal(modulate(each, own, other, other), modulate(each, x, gate, gate))
    wide = in_numpy(normal(1, length, 3, 256))
    assert_equal(norm(wide), norm(mx.array(wide)))
    parts, halves = np.split(wide.reshape(1, length, -1), 3, axis=-1), mx.array(wide)
    assert_equal(norm(parts[1]), norm(halves[:, :, 1]))
    assert_equal(
        swiglu_in_place(parts[0], parts[2]),
        swiglu_in_place(*halves[0, :, ::2].swapaxes(0, 1))[None],
    )
    assert_equal(add(own, in_numpy(y)), add(x, y))
    assert_equal(add(own, in_numpy(y), other), add(x, y, gate))
    assert_equal(add(own, in_numpy(y), other, norm), add(x, y, gate, norm))
    assert_equal(own, x)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_layers_equal_those_of_mlx(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, down, up = normal(1, 30, 16), normal(2, 16), normal(24, 2)
    layer, scales = Linear(16, 24, bias=bias), normal(2)
    effects: list[Effect] = [PairEffect(down, up, 0.5), MatrixEffect(normal(24, 16))]
    layers = [
        layer,
        AdaptedLinear(layer, [(effects[0], 2.0)], None),
        AdaptedLinear(layer, [(each, 0.25) for each in effects], None),
        AdaptedLinear(layer, [], normal(24)),
    ]
    for each in layers:
        found, sliced = each(in_numpy(x)), each(np.asfortranarray(in_numpy(x)))
        assert isinstance(found, np.ndarray)
        by_blas = each(x)
        with monkeypatch.context() as patch:
            patch.setattr(blas, "is_fast", lambda: False)
            wanted = np.array(each(x))
        for one in (found, sliced, by_blas):
            np.testing.assert_allclose(np.array(one), wanted, atol=1e-5)
    y = normal(1, 30, 24)
    changed = add_low_rank(in_numpy(y), in_numpy(x), down, up, scales)
    np.testing.assert_allclose(changed, add_low_rank(y, x, down, up, scales), atol=1e-5)


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
    own, key, value = (in_numpy(each) for each in (queries, keys, values))
    np.testing.assert_allclose(attention(own, key, value, 0.5, mask), expected, atol=1e-5)
    found = attention(queries, keys, values, 0.5, mask)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


def test_attention_in_parts_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = (normal(1, 50, 2, 16) for _ in range(3))
    mask = mx.arange(50)[:, None] >= mx.arange(50)[None]
    whole = np.array(attention(mx.array(queries), keys, values, 0.5, mask))
    monkeypatch.setattr(attention_module, "MAX_SCORES", 50 * 2 * 4 * 3)  # three rows
    monkeypatch.setattr(attention_module, "_SCORES", 1)  # sixteen rows
    tiles = attention(mx.array(queries), keys, values, 0.5, mask)
    np.testing.assert_allclose(np.array(tiles), whole, atol=1e-6)
    monkeypatch.setattr(blas, "is_fast", lambda: False)
    rows = attention(mx.array(queries), keys, values, 0.5, mask)
    np.testing.assert_allclose(np.array(rows), whole, atol=1e-6)


def test_scores_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 32
    monkeypatch.setattr(attention_module, "MAX_SCORES", 4 * 512 * 512 * 2 // parts)  # heads, bytes
    queries, keys, values = (normal(1, 512, 4, 8).astype(mx.bfloat16) for _ in range(3))
    mx.eval(queries, keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attention(queries, keys, values, 0.5))
    arrays = 6 * queries.nbytes  # queries, keys, values, parts and results
    assert mx.get_peak_memory() - before < arrays + 4 * attention_module.MAX_SCORES


@pytest.mark.parametrize("rotate", [rope.rotate_pairs, rope.rotate_halves])
def test_rotations_in_place_equal_those_of_mlx(rotate: object) -> None:
    assert callable(rotate)
    tables = normal(40, 8), normal(40, 8)
    given = [normal(1, 40, 3, 16), normal(1, 40, 2, 16)]
    found = rotate([in_numpy(each) for each in given], tables)
    for own, wanted in zip(found, rotate(given, tables), strict=True):
        np.testing.assert_allclose(own, np.array(wanted), atol=1e-6)

"""Cast tensors with --dtype: exact bits, and refused values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.importer import Recipe, precision
from clowder_aimage.model.backend import mx
from tests.importer.valued import (
    as_dtype,
    bf16_values,
    blob_of,
    make_valued,
    read_back,
    stored,
    transformer,
)

MLX = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
WIDTH = {"F32": 4, "F16": 2, "BF16": 2}


def tensor_of(store: Path, layer: str) -> tuple[Any, tuple[Any, ...], bytes]:
    """Return dtype, shape and bytes of the only tensor in a layer's blob, by another parser."""
    ((_, info),) = safetensors.deserialize(blob_of(store, read_back(store), layer))
    return info["dtype"], tuple(info["shape"]), bytes(info["data"])


def mlx_array(data: bytes, dtype: str) -> mx.array:
    bits = mx.array(np.frombuffer(data, f"<u{WIDTH[dtype]}"))
    return bits.view(MLX[dtype])


def mlx_bytes(array: mx.array) -> bytes:
    bits = mx.array(array).view(mx.uint16 if array.itemsize == 2 else mx.uint32)
    return np.array(bits).tobytes()


def every_f32() -> np.ndarray:
    """Return random bits and all special values: zeros, subnormals, infinities, NaN, ties."""
    bits = np.random.default_rng(7).integers(0, 2**32, 100_000, dtype=np.uint32)
    special = [0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x7F800000, 0xFF800000]
    special += [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x477FE000, 0x33000000]
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.concatenate([bits[~nan], np.array(special, np.uint32)]).view("<f4")


@pytest.mark.parametrize(
    ("source", "target"),
    [("F32", "F16"), ("F32", "BF16"), ("F16", "BF16"), ("BF16", "F16"), ("BF16", "F32")],
)
def test_values_equal_those_of_mlx(source: str, target: str) -> None:
    if source == "F32":
        values = every_f32()
        values = values[np.abs(values) < 65504] if target == "F16" else values
        values = values[~(np.abs(values) > 3.38e38)] if target == "BF16" else values
        data = values.tobytes()
    else:
        halves = np.arange(2**16, dtype="<u2")
        wide = np.array(mlx_array(halves.tobytes(), source).astype(mx.float32))
        keep = ~np.isnan(wide) & (np.abs(wide) < (65504 if target == "F16" else np.inf))
        data = halves[keep].tobytes()
    made, lost = precision.cast(memoryview(data), source, target)
    assert lost == 0
    assert made.tobytes() == mlx_bytes(mlx_array(data, source).astype(MLX[target]))


@pytest.mark.parametrize("target", ["F16", "BF16"])
def test_nan_is_kept_with_its_sign(target: str) -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF80FFFF, 0x7FFFFFFF], "<u4")
    made, lost = precision.cast(memoryview(bits.tobytes()), "F32", target)
    back = np.array(mlx_array(made.tobytes(), target).astype(mx.float32))
    assert np.isnan(back).all()
    assert lost == 0
    assert (
        (made.astype(np.uint32).view(np.uint32) if target == "BF16" else made.view("<u2")) >> 15
    ).tolist() == [0, 1, 0, 1, 0]


def test_float64_is_rounded_once() -> None:
    """Just above halfway between two BF16 values: rounding through float32 loses the last bit."""
    values = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 2**-8, -1 - 2**-8 - 2**-40])
    made, _ = precision.cast(memoryview(values.tobytes()), "F64", "BF16")
    assert made.tolist() == [0x3F81, 0x3F80, 0x3F80, 0xBF81]


def test_values_that_become_infinite_are_counted() -> None:
    values = np.array([65519.9, 65520.0, -1e30, np.inf, -np.inf, np.nan, 1.0], "<f4")
    assert precision.cast(memoryview(values.tobytes()), "F32", "F16")[1] == 2
    values = np.array([3.3895e38, 3.4e38, np.inf], "<f4")
    assert precision.cast(memoryview(values.tobytes()), "F32", "BF16")[1] == 1


# -- auto


def test_auto_stores_bf16_values_at_half_the_size_without_loss(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model", "F32")
    plain = make_valued(tmp_path / "bf16", "BF16")
    packed = model.make(dtype="auto")
    assert packed.report.cast == {("F32", "BF16"): packed.report.tensors}
    assert packed.report.saved == 2 * packed.report.parameters
    assert str(packed.descriptor.digest) == plain.recipe_digest()
    for name, values in transformer().items():
        dtype, shape, data = tensor_of(model.store, f"transformer/{name}")
        assert (dtype, shape) == ("BF16", values.shape)
        assert np.array_equal(np.array(mlx_array(data, dtype).astype(mx.float32)), values.ravel())


@pytest.mark.parametrize(("place", "bit"), [(0, 0), (262_144, 15), (-1, 0)])
def test_auto_checks_every_value_of_a_tensor(tmp_path: Path, place: int, bit: int) -> None:
    """One set low bit keeps that whole tensor in F32, and no other."""
    values = transformer()
    values["layers.0.large.weight"] = bf16_values("large", (600, 512))
    values["layers.0.large.weight"].reshape(-1).view(np.uint32)[place] |= 1 << bit
    model = make_valued(tmp_path / "model", transformer=as_dtype(values, "F32"))
    packed = model.make(dtype="auto")
    assert packed.report.cast == {("F32", "BF16"): len(values) - 1}
    dtype, _, data = tensor_of(model.store, "transformer/layers.0.large.weight")
    assert dtype == "F32"
    assert data == values["layers.0.large.weight"].tobytes()


# -- explicit types


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_all_floats_are_cast_to_the_requested_type(tmp_path: Path, dtype: str) -> None:
    numbers = {"position_ids": ("I64", (4,), bytes(range(32))), "mask": ("BOOL", (2,), b"\0\1")}
    tensors = as_dtype(transformer(), "F32") | numbers
    model = make_valued(tmp_path / "model", transformer=tensors)
    packed = model.make(dtype=dtype)
    layers = {layer.name: layer for layer in packed.aimage.layers if layer.is_tensor}
    names = {layer.dtype for name, layer in layers.items() if not name.endswith(tuple(numbers))}
    assert names == {dtype.upper()}
    for name, (kind, shape, data) in numbers.items():
        assert tensor_of(model.store, f"transformer/{name}") == (kind, shape, data)
    config = packed.aimage.properties["components"]["transformer"]
    assert config["dtype"] == dtype.upper()
    assert config["size"] == sum(
        layer.descriptor.size
        for layer in packed.aimage.layers
        if layer.name.startswith("transformer/")
    )


def test_a_value_that_f16_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    values = transformer()
    values["layers.0.attention.to_q.weight"][3, 5] = 70000.0
    values["layers.0.attention.to_q.weight"][3, 6] = -1e38
    for dtype in ("F32", "BF16"):
        tensors = as_dtype(values, dtype)
        model = make_valued(tmp_path / dtype / "model", transformer=tensors)
        with pytest.raises(ModelError) as caught:
            model.make(dtype="f16")
        assert "2 values of transformer/layers.0.attention.to_q.weight" in caught.value.message
        assert "use bf16" in str(caught.value.hint)
        assert not model.store.exists()
        assert model.make(dtype="bf16")


@pytest.mark.parametrize(
    ("recipe", "ends", "hint"),
    [
        ({"dtype": "bf16"}, "BF16 (maximum 3.39e38)", "use f32"),
        ({"quantize": "int8"}, "F32 (maximum 3.4e38)", "keep the original dtype"),
    ],
    ids=str,
)
def test_the_hint_names_a_type_with_a_larger_range(
    tmp_path: Path, recipe: Any, ends: str, hint: str
) -> None:
    name = "layers.0.attention.to_q.weight"
    values = transformer()
    values[name] = values[name].astype(np.float64)
    values[name][0, 0] = 1e300
    tensors = as_dtype(values, "F64")
    model = make_valued(tmp_path / "model", transformer=tensors)
    with pytest.raises(ModelError) as caught:
        model.make(**recipe)
    assert caught.value.message == f"1 value of transformer/{name} cannot be stored as {ends}"
    assert hint in str(caught.value.hint)


def test_float64_can_be_stored_smaller(tmp_path: Path) -> None:
    tensors = {name: stored(value, "F64") for name, value in transformer().items()}
    model = make_valued(tmp_path / "model", transformer=tensors)
    assert model.recipe_digest(dtype="bf16") == make_valued(tmp_path / "b").recipe_digest()


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown dtype"):
        Recipe.parse("BF16")


def test_missing_packages_are_reported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = make_valued(tmp_path / "model")
    with pytest.raises(UsageError, match="changing weights needs the extra") as caught:
        model.make(dtype="auto")
    assert (caught.value.remedy, caught.value.facts) == ("install_extra", {"extra": "mlx"})
    assert model.make()

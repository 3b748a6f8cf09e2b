"""Values that quantization would silently ruin: NaN, infinities, too small or too large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import ModelError
from clowder_aimage.importer import blob_encoder
from clowder_aimage.importer.quantization_guard import QuantizationGuard
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.backend import mx
from clowder_aimage.tensor import Quantization
from tests.importer.test_importer_quantize import parts
from tests.importer.valued import (
    ValuedModel,
    as_dtype,
    blob_of,
    make_valued,
    read_back,
    transformer,
)

NAME = "layers.0.attention.to_q.weight"
TYPES = ["int4", "int8", "nvfp4", "mxfp8"]


def model_of(directory: Path, change: Any, dtype: str = "BF16") -> ValuedModel:
    """Return the default model with ``change`` applied to the values of NAME."""
    values = transformer()
    change(values[NAME])
    return make_valued(directory, transformer=as_dtype(values, dtype))


def dequantized(model: ValuedModel, kind: str, dtype: str = "BF16") -> np.ndarray:
    """Return the dequantized values of the blob of NAME."""
    _, found = parts(blob_of(model.store, read_back(model.store), f"transformer/{NAME}"))
    quantization = Quantization.parse(kind)
    arrays = []
    for word, shape, data in found.values():
        bits = np.frombuffer(data, {"U32": "<u4", "U8": "u1", "BF16": "<u2", "F32": "<u4"}[word])
        array = mx.array(bits.reshape(shape))
        floats = {"BF16": mx.bfloat16, "F32": mx.float32}
        arrays.append(array.view(floats[word]) if word in floats else array)
    facts: dict[str, Any] = {"bits": quantization.type.bits, "mode": quantization.type.mode}
    codes, scales, *biases = arrays
    size = quantization.group_size
    bias = biases[0] if biases else None
    return np.array(mx.dequantize(codes, scales, bias, size, dtype=mx.float32, **facts))


# -- not finite


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [("int4", "F64", np.nan), ("nvfp4", "F16", -np.inf), ("mxfp8", "BF16", np.nan)],
)
def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, kind: str, dtype: str, value: float
) -> None:
    def spoil(values: Any) -> None:
        values[3, 5] = value

    model = model_of(tmp_path / "model", spoil, dtype)
    with pytest.raises(ModelError) as caught:
        model.make(quantize=kind)
    assert caught.value.message == f"1 value of transformer/{NAME} is NaN or infinite"
    assert "keep it unquantized, or repair the model" in str(caught.value.hint)
    assert caught.value.exit_code == 1
    assert list(ImageLayout(model.store).list_tags()) == []


def test_kept_tensors_need_not_be_finite(tmp_path: Path) -> None:
    values = transformer()
    values["layers.0.attention_norm1.weight"][0] = np.nan
    model = make_valued(tmp_path / "model", transformer=as_dtype(values, "F32"))
    assert model.make(quantize="int8")


def test_every_block_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(values: Any) -> None:
        values[62:, 0] = np.inf

    monkeypatch.setattr(blob_encoder, "BLOCK", 64 * 2)
    with pytest.raises(ModelError, match=f"1 value of transformer/{NAME} is NaN or infinite"):
        model_of(tmp_path / "model", spoil).make(quantize="int4")


# -- nearly zero


@pytest.mark.parametrize(("dtype", "size"), [("F32", 1e-38), ("BF16", 1e-37)])
def test_a_row_that_is_nearly_zero_becomes_zeros_in_mxfp8(
    tmp_path: Path, dtype: str, size: float
) -> None:
    def shrink(values: Any) -> None:
        values[7] = np.where(np.arange(64) % 2, size, -size)

    model = model_of(tmp_path / "model", shrink, dtype)
    model.make(quantize="mxfp8")
    found = dequantized(model, "mxfp8")
    assert np.isfinite(found).all()
    assert np.abs(found[7]).max() == 0
    assert np.abs(found[6]).max() > 0.01


@pytest.mark.parametrize(("kind", "dtype"), [("mxfp4", "F32"), ("mxfp8", "BF16")])
def test_admitted_values_are_read_back_within_rounding(kind: str, dtype: str) -> None:
    """Groups of one value each, over all exponents of float32."""
    exponents = np.arange(-149, 120)
    values = np.repeat(np.ldexp(1.5, exponents).astype(np.float32)[:, None], 32, axis=1)
    words = values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    quantization = Quantization.parse(kind)
    admitted = mx.array(QuantizationGuard("x", dtype, quantization).admit(words))
    admitted = admitted if dtype == "F32" else admitted.view(mx.bfloat16)
    facts: dict[str, Any] = {"group_size": 32, "bits": quantization.type.bits, "mode": kind}
    made = mx.quantize(admitted, **facts, stream=mx.cpu)
    found = np.array(mx.dequantize(*made, **facts, dtype=mx.float32, stream=mx.cpu))
    kept = exponents >= -118
    assert np.array_equal(found[~kept], np.zeros_like(found[~kept]))
    np.testing.assert_allclose(found[kept], values[kept], rtol=0.35)


# -- too small


def shrunk(share: float, factor: float) -> Callable[[Any], None]:
    """Multiply ``share`` of the rows by ``factor``."""

    def change(values: Any) -> None:
        values[: round(share * len(values))] *= np.float32(factor)

    return change


@pytest.mark.parametrize(
    ("kind", "factor", "dtype"),
    [("nvfp4", 1e-4, "F32"), ("int4", 1e-8, "BF16"), ("int8", 1e-9, "F32")],
)
def test_losing_over_a_hundredth_of_the_groups_is_refused(
    tmp_path: Path, kind: str, factor: float, dtype: str
) -> None:
    model = model_of(tmp_path / "half" / "model", shrunk(0.5, factor), dtype)
    with pytest.raises(ModelError) as caught:
        model.make(quantize=kind)
    assert caught.value.message == (
        f"the values of transformer/{NAME} are too small for {kind}: 50 % of its groups would "
        "become zero"
    )
    assert caught.value.hint == "use mxfp8, whose scales have a larger range"
    assert list(ImageLayout(model.store).list_tags()) == []
    assert model.make(quantize="mxfp8")


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_zeros_are_not_lost(tmp_path: Path, kind: str) -> None:
    """Zeros do not hide the loss of all other values."""
    model = model_of(tmp_path / "zeros" / "model", shrunk(0.9, 0.0))
    model.make(quantize=kind)
    assert np.abs(dequantized(model, kind)[-1]).max() > 0.01

    def only_tiny(values: Any) -> None:
        values[1:] = 0
        values[0] *= np.float32(1e-9)

    with pytest.raises(ModelError, match="100 % of its groups would become zero"):
        model_of(tmp_path / "tiny" / "model", only_tiny).make(quantize=kind)


def test_few_lost_groups_are_allowed(tmp_path: Path) -> None:
    def shrink(values: Any) -> None:
        values[0, :16] *= np.float32(1e-9)  # a group of 256

    assert model_of(tmp_path / "model", shrink).make(quantize="nvfp4")


@pytest.mark.parametrize(("kind", "dtype"), [("int4", "F32"), ("int8", "F16"), ("nvfp4", "BF16")])
def test_the_count_equals_groups_dequantized_to_zeros(kind: str, dtype: str) -> None:
    """Rows of every magnitude and both signs, dequantized by MLX."""
    rng = np.random.default_rng(5)
    quantization = Quantization.parse(kind)
    sizes = np.ldexp(1.0, -np.arange(24) if dtype == "F16" else -np.arange(60))[:, None]
    values = (rng.standard_normal((len(sizes), 128)) * sizes).astype(np.float32)
    values[::7] = np.abs(values[::7])
    values[3] = 0
    floats = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    array = mx.array(values).astype(floats[dtype])
    facts: dict[str, Any] = {"bits": quantization.type.bits, "mode": quantization.type.mode}
    facts["group_size"] = size = quantization.group_size
    made = mx.quantize(array, **facts, stream=mx.cpu)
    found = np.array(mx.dequantize(*made, **facts, stream=mx.cpu).astype(mx.float32))
    given = np.array(array.astype(mx.float32)).reshape(-1, size)
    lost = int((given.any(axis=1) & ~found.reshape(-1, size).any(axis=1)).sum())
    words = np.array(array.view(mx.uint32 if dtype == "F32" else mx.uint16))
    guard = QuantizationGuard("x", dtype, quantization)
    codes, scales, *biases = (
        np.array(a.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.itemsize])).tobytes()
        for a in made
    )
    guard.count(words, codes, scales, biases[0] if biases else None)
    assert (guard._lost, guard._groups) == (lost, int(given.any(axis=1).sum()))


# -- too large


def with_value(value: float) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        values[3, 5] = value

    return change


@pytest.mark.parametrize(
    ("kind", "dtype", "value", "end"),
    [
        ("nvfp4", "F32", 2689.0, "2688"),
        ("nvfp4", "F16", -2690.0, "2688"),
        ("int4", "BF16", 3.3e38, "1.7e\\+38"),
        ("mxfp8", "F32", 3.3e38, "2.977e\\+38"),
    ],
    ids=str,
)
def test_values_beyond_the_type_are_refused(
    tmp_path: Path, kind: str, dtype: str, value: float, end: str
) -> None:
    model = model_of(tmp_path / "model", with_value(value), dtype)
    said = f"^1 value of transformer/{NAME} is too large for {kind}, whose maximum is {end}$"
    with pytest.raises(ModelError, match=said) as caught:
        model.make(quantize=kind)
    assert ("mxfp8" if kind == "nvfp4" else "keep it") in str(caught.value.hint)
    assert list(ImageLayout(model.store).list_tags()) == []


@pytest.mark.parametrize(
    ("kind", "value", "dtype"),
    [("nvfp4", 2688.0, "F32"), ("int8", 1.6e38, "BF16"), ("mxfp8", 2.9e38, "F32")],
)
def test_the_largest_values_round_trip(tmp_path: Path, kind: str, dtype: str, value: float) -> None:
    model = model_of(tmp_path / "model", with_value(value), dtype)
    model.make(quantize=kind)
    assert dequantized(model, kind, dtype)[3, 5] == pytest.approx(value, rel=0.08)


# -- valid weights


@pytest.mark.parametrize(
    ("kind", "dtype"), list(zip(TYPES, ["F32", "F16", "BF16", "F32"], strict=True))
)
def test_typical_weights_are_accepted(tmp_path: Path, kind: Any, dtype: Any) -> None:
    """Distributions of real networks, and wider ones."""
    rng = np.random.default_rng(11)
    normal = rng.standard_normal((128, 128))
    weights = {
        "gaussian": normal,
        "uniform": rng.random(normal.shape) - 0.5,
        "long tails": np.exp(2 * normal),
        "an outlier a group": normal * np.where(np.arange(128) % 64 == 0, 50, 1),
        "one number": np.full(normal.shape, 0.7),
        "far from zero": 5 + normal,
        "few rows": normal * np.where(np.arange(128) % 128 == 0, 1e-9, 1)[:, None],
    }
    values = {f"{name}.weight": (0.02 * one).astype(np.float32) for name, one in weights.items()}
    model = make_valued(tmp_path / "model", transformer=as_dtype(values, dtype))
    assert model.make(quantize=kind).report.quantized["transformer"]["tensors"] == len(weights)

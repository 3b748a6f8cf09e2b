"""fp8: mxfp8 with one scale for each row, as exact numbers say, in the form that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.document.schema import validate
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.importer import Recipe, blob_encoder, quantizer
from clowder_aimage.importer.row_quantizer import quantize_rows
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.backend import mx
from clowder_aimage.model.dequantize import dequantize
from clowder_aimage.tensor.float_code import E4M3, E8M0
from clowder_aimage.tensor.quantization import ROW_SCALED, parse_precision
from tests.importer.test_importer_quantize import parts
from tests.importer.valued import (
    BLOCK,
    ValuedModel,
    as_dtype,
    bf16_values,
    blob_of,
    make_valued,
    read_back,
    stored,
)

NAME = "layers.1.attention.to_q.weight"
# Numbers of E4M3 in order, and as many powers of two as fit between them
POSITIVE = E4M3[:127].astype(np.float64)
Arrays = tuple[np.ndarray, np.ndarray]


def words(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values as ``quantize_rows`` takes them."""
    word = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[dtype]
    return np.frombuffer(stored(values, dtype)[2], word).reshape(values.shape)


def quantized(values: np.ndarray, dtype: str = "F32") -> Arrays:
    """Return the codes and the scales, (rows, columns) and (rows, groups)."""
    codes, scales = quantize_rows(words(values, dtype), dtype)
    return (
        np.frombuffer(codes, np.uint8).reshape(values.shape),
        np.frombuffer(scales, np.uint8).reshape(len(values), -1),
    )


def judge(values: np.ndarray) -> Arrays:
    """Return the codes and the scale of each row by exact numbers, one by one."""
    codes, scales = np.zeros(values.shape, np.uint8), np.zeros(len(values), np.uint8)
    for row, line in enumerate(values.astype(np.float64)):
        k = -127
        while np.abs(line).max() / 2.0**k > 448:
            k += 1
        scales[row] = k + 127
        for column, value in enumerate(line / 2.0**k):
            distances = np.abs(POSITIVE - abs(value))
            nearest = np.flatnonzero(distances == distances.min())
            # of two, the one with an even code
            code = next((c for c in nearest if c % 2 == 0), nearest[0])
            codes[row, column] = code | (128 if np.signbit(value) else 0)
    return codes, scales


def near_numbers() -> np.ndarray:
    """Return all numbers of E4M3, the midpoints between them, and what is next to both."""
    midpoints = (POSITIVE[1:] + POSITIVE[:-1]) / 2
    exact = np.concatenate([POSITIVE, midpoints]).astype(np.float32)
    values = np.concatenate([exact, np.nextafter(exact, np.float32(1e9)), np.nextafter(exact, 0)])
    # without the number after 448, which would need the next scale
    return np.minimum(values, 448)


@pytest.mark.parametrize("k", [-119, -20, 0, 1, 111])
def test_codes_are_the_nearest_with_ties_to_even(k: int) -> None:
    values = near_numbers()
    values = np.append(values, np.zeros(-len(values) % 32, np.float32))
    rows = np.ldexp(np.stack([values, -values]), k)
    codes, scales = quantized(rows.astype(np.float32))
    expected, expected_scales = judge(rows)
    assert np.array_equal(codes, expected)
    assert np.array_equal(scales, np.repeat(expected_scales[:, None], scales.shape[1], axis=1))
    assert (scales == 127 + k).all()


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_rows_of_any_magnitude_have_the_least_scale(dtype: str) -> None:
    rng = np.random.default_rng(3)
    sizes = np.ldexp(1.0, np.arange(-24, 15) if dtype == "F16" else np.arange(-149, 120))
    values = rng.uniform(-1.9, 1.9, (len(sizes), 32)) * sizes[:, None]
    values = values.astype(np.float32)
    if dtype != "F32":
        word = words(values, dtype)
        values = (
            word.astype(np.float32)
            if dtype == "F16"
            else (word.astype(np.uint32) << 16).view(np.float32)
        )
    codes, scales = quantized(values, dtype)
    expected, expected_scales = judge(values)
    assert np.array_equal(codes, expected)
    assert np.array_equal(scales[:, 0], expected_scales)


def test_the_scale_changes_just_above_448() -> None:
    rows = np.zeros((3, 64), np.float32)
    rows[:, 40] = 448, np.nextafter(np.float32(448), np.float32(1e9)), 0
    codes, scales = quantized(rows)
    assert scales.tolist() == [[127, 127], [128, 128], [0, 0]]
    assert E4M3[codes[:, 40]].tolist() == [448, 224, 0]
    assert E8M0[0] == 2.0**-127


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_mlx_dequantizes_the_same_values_bit_for_bit(dtype: str) -> None:
    """MLX reads them as its own mxfp8, and so does numpy's reader."""
    rng = np.random.default_rng(5)
    exponents = np.arange(-130, 120)
    values = rng.standard_normal((len(exponents), 96)) * np.ldexp(0.3, exponents)[:, None]
    values[3] = 0
    values[-1, 0] = 448 * 2.0**119
    values = values.astype(np.float32)
    codes, scales = quantized(values, dtype)
    exact = (E4M3[codes].astype(np.float64) * np.exp2(scales[:, :1].astype(float) - 127)).astype(
        np.float32
    )
    by_numpy = dequantize(ROW_SCALED, codes.view(np.uint32), scales)
    by_mlx = mx.dequantize(
        mx.array(codes.view(np.uint32)),
        mx.array(scales),
        group_size=32,
        bits=8,
        mode="mxfp8",
        dtype=mx.float32,
        stream=mx.cpu,
    )
    assert np.array_equal(by_numpy, exact)
    assert np.array_equal(np.array(by_mlx), exact)
    assert exact[-1, 0] == np.float32(448 * 2.0**119)


# -- create


def make_model(directory: Path, dtype: str = "BF16", **changed: np.ndarray) -> ValuedModel:
    """Write a model with three blocks, a refiner and an embedder."""
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.{number}.{name}": (64, 96) for number in range(3) for name in BLOCK
    }
    shapes |= {f"noise_refiner.0.{name}": (64, 96) for name in BLOCK}
    shapes |= {"layers.1.adaLN_modulation.0.weight": (64, 64), "x_embedder.weight": (64, 64)}
    shapes |= {"layers.1.narrow.weight": (64, 40), "layers.1.attention_norm1.weight": (64,)}
    values = {name: bf16_values(name, shape) for name, shape in shapes.items()}
    return make_valued(directory, dtype, transformer=as_dtype(values | changed, dtype))


def test_a_blob_is_an_mxfp8_blob_with_equal_scales_in_each_row(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    packed = model.make(quantize="fp8")
    found = {layer.name for layer in packed.aimage.layers if layer.dtype == "mxfp8"}
    assert found == {
        f"transformer/{block}.{name}" for block in ("layers.1", "noise_refiner.0") for name in BLOCK
    }
    metadata, tensors = parts(blob_of(model.store, read_back(model.store), f"transformer/{NAME}"))
    assert metadata == {"quant_type": "mxfp8", "group_size": "32"}
    codes, scales = quantized(bf16_values(NAME, (64, 96)))
    assert tensors == {
        NAME: ("U32", (64, 24), codes.tobytes()),
        f"{NAME}.scale": ("U8", (64, 3), scales.tobytes()),
    }
    config = packed.aimage.properties
    validate("aimage-config", config)
    reasons = {"embedder": 1, "first block": 7, "last block": 7, "modulation": 1, "norm": 1}
    assert packed.report.quantized["transformer"] == {
        "type": "mxfp8",
        "group_size": 32,
        "scales": "row",
        "tensors": 14,
        "kept": reasons | {"rows no multiple of 32": 1},
    }
    assert config["components"]["transformer"]["dtype"] == "BF16"


def test_the_digest_is_independent_of_threads_and_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    digest = model.recipe_digest(quantize="fp8", jobs=1)
    assert model.recipe_digest(quantize="fp8", jobs=16) == digest
    # less than a row, and a few of them
    for block in (64, 96 * 2 * 5):
        monkeypatch.setattr(blob_encoder, "BLOCK", block)
        assert model.recipe_digest(quantize="fp8", jobs=3) == digest


def test_other_weights_of_the_component_become_bf16(tmp_path: Path) -> None:
    """The same model from F32 and BF16, unless a type is requested."""
    wide = make_model(tmp_path / "wide" / "model", "F32")
    packed = wide.make(quantize="fp8")
    dtypes = {layer.dtype for layer in packed.aimage.list_layers("transformer") if layer.dtype}
    assert dtypes == {"BF16", "mxfp8"}
    assert packed.aimage.get_layer("vae/decoder.mid.weight").dtype == "F32"
    narrow = make_model(tmp_path / "narrow" / "model").make(quantize="fp8")
    assert [layer.descriptor for layer in packed.aimage.list_layers("transformer")] == [
        layer.descriptor for layer in narrow.aimage.list_layers("transformer")
    ]
    packed = wide.make("kept", quantize="fp8", dtype="f32")
    assert packed.aimage.get_layer("transformer/x_embedder.weight").dtype == "F32"


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("BF16", np.nan, "1 value of transformer/{} is NaN or infinite"),
        ("F32", -np.inf, "1 value of transformer/{} is NaN or infinite"),
        ("F32", 3.3e38, "1 value of transformer/{} is too large for mxfp8, whose maximum is"),
    ],
)
def test_values_without_a_code_are_refused(
    tmp_path: Path, dtype: str, value: float, said: str
) -> None:
    spoiled = bf16_values(NAME, (64, 96))
    spoiled[63, 95] = value
    model = make_model(tmp_path / "model", dtype, **{NAME: spoiled})
    with pytest.raises(ModelError) as caught:
        model.make(quantize="fp8")
    assert caught.value.message.startswith(said.format(NAME))
    assert list(ImageLayout(model.store).list_tags()) == []


def test_no_mlx_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("MLX is used")

    monkeypatch.setattr(quantizer.Quantizer, "__init__", refuse)
    assert make_model(tmp_path / "model").make(quantize="fp8")


def test_a_model_without_other_blocks_is_refused(tmp_path: Path) -> None:
    values = {f"layers.0.{name}": bf16_values(name, (64, 96)) for name in BLOCK}
    model = make_valued(tmp_path / "model", transformer=as_dtype(values, "BF16"))
    with pytest.raises(UsageError, match="no tensor of the transformer") as caught:
        model.make(quantize="fp8")
    assert str(caught.value.hint).endswith("are not quantized because of: first block")


def test_fp8_is_one_thing_in_options() -> None:
    recipe = Recipe.parse(quantize="transformer=FP8,text_encoder=mxfp8")
    assert recipe.quantize["transformer"] == ROW_SCALED
    assert recipe.quantize["text_encoder"] != ROW_SCALED
    assert {one.type.name for one in recipe.quantize.values()} == {"mxfp8"}
    assert parse_precision("fp8") == recipe.precision == "mxfp8"

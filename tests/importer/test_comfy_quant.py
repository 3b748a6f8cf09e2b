"""Quantized files of ComfyUI are decoded exactly, and others are refused with a sentence."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats.codes.comfy_quant import METADATA
from clowder_aimage.formats.weight_source import WeightSource, read_source
from clowder_aimage.tensor.weight import SourceTensor
from tests.importer.coded_file import (
    FP4,
    Array,
    Entry,
    float8,
    number,
    rounded,
    save,
    swizzled,
    text,
    values_of,
)

ROWS, COLUMNS = 130, 160  # more than a tile of scales, and a part of one
RANDOM = np.random.default_rng(7)
FINITE = [code for code in range(256) if code & 127 != 127]  # E4M3
CODES = RANDOM.choice(np.array(FINITE, np.uint8), (ROWS, COLUMNS))
INTEGERS = RANDOM.integers(-128, 128, (ROWS, COLUMNS), np.int8)
KEPT = ("BF16", np.arange(8, dtype="<u2"))


def decoded(path: Path) -> tuple[WeightSource, dict[str, SourceTensor]]:
    source = read_source(path)
    return source, {tensor.name: tensor for tensor in source.tensors}


def same(found: Array, expected: Any) -> None:
    wanted = np.asarray(expected, np.float64).astype(np.float32)
    assert found.view("<u4").tolist() == wanted.view("<u4").tolist()


def described(kind: str, **more: Any) -> Entry:
    return text({"format": kind, **more})


def products(codes: Array, scale: float, bits: int = 4) -> Array:
    return np.array([[rounded(float8(int(c), bits) * scale) for c in row] for row in codes])


SCALED = {"w.weight": ("F8_E4M3", CODES), "n.weight": KEPT}


LAYERS = json.dumps({"layers": {"w": {"format": "float8_e4m3fn"}}})
MARKER: Entry = ("F8_E4M3", CODES[0, :2])


@pytest.mark.parametrize(
    "words, metadata, scale, dtype",
    [
        ({"scaled_fp8": MARKER, "w.scale_weight": 1, "w.scale_input": 3}, None, 0.0123, "F32"),
        ({"w.weight_scale": 1, "w.comfy_quant": 0, "w.input_scale": 3}, None, 2.0**-5, "BF16"),
        ({"w.weight_scale": 1}, LAYERS, 0.0123, "F32"),
        ({"w.weight_scale": 1}, '{"layers": {"w": "float8_e4m3fn"}}', 2.0**-5, "BF16"),
    ],
    ids=["old", "tensor", "header", "text"],
)
def test_scaled_fp8_of_any_form_is_decoded(
    words: dict[str, Any], metadata: str | None, scale: float, dtype: str, tmp_path: Path
) -> None:
    found = {0: described("float8_e4m3fn"), 1: number(scale), 3: number(2)}
    more = {name: found[word] if isinstance(word, int) else word for name, word in words.items()}
    path = save(tmp_path / "x", {**SCALED, **more}, {METADATA: metadata} if metadata else None)
    source, tensors = decoded(path)
    assert list(tensors) == ["w.weight", "n.weight"]
    assert source.decoded == {("float8_e4m3fn", dtype): 1} and not source.is_exact
    assert tensors["n.weight"].decoded is None
    assert tensors["w.weight"].dtype == dtype
    same(values_of(tensors["w.weight"]), products(CODES, rounded(scale)))
    same(
        values_of(tensors["w.weight"].slice_rows("v", 3, 70)), products(CODES[3:70], rounded(scale))
    )


@pytest.mark.parametrize("dtype, bits", [("F8_E4M3", 4), ("F8_E5M2", 5)])
def test_floats_of_8_bits_without_a_scale_are_a_cast(dtype: str, bits: int, tmp_path: Path) -> None:
    every = np.arange(256, dtype=np.uint8)
    codes: Array = every[every & 127 < (127 if bits == 4 else 124)].reshape(2, -1)
    path = save(tmp_path / "x", {"w.weight": (dtype, codes), "w.bias": (dtype, codes[0])})
    _, tensors = decoded(path)
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    same(values_of(tensors["w.weight"]), products(codes, 1, bits))
    same(values_of(tensors["w.bias"]), products(codes[:1], 1, bits)[0])


@pytest.mark.parametrize("shape", [(), (ROWS,), (ROWS, 1)])
def test_int8_has_a_scale_of_the_tensor_or_of_rows(shape: tuple[int, ...], tmp_path: Path) -> None:
    scales = RANDOM.standard_normal(shape).astype("<f4")
    entries = {
        "w.weight": ("I8", INTEGERS),
        "w.weight_scale": ("F32", scales),
        "w.comfy_quant": described("int8_tensorwise"),
    }
    _, tensors = decoded(save(tmp_path / "x", entries))
    wanted = INTEGERS.astype(np.float64) * scales.reshape(-1, 1).astype(np.float64)
    same(values_of(tensors["w.weight"]), wanted)
    same(values_of(tensors["w.weight"].slice_rows("v", 100, 130)), wanted[100:])


@pytest.mark.parametrize("shape", [(), (ROWS, 1)])
def test_rotated_int8_is_turned_back(shape: tuple[int, ...], tmp_path: Path) -> None:
    scales = RANDOM.standard_normal(shape).astype("<f4")
    entries = {
        "w.weight": ("I8", INTEGERS),
        "w.weight_scale": ("F32", scales),
        "w.comfy_quant": described("int8_tensorwise", convrot=True, convrot_groupsize=16),
    }
    source, tensors = decoded(save(tmp_path / "x", entries))
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    whole = np.kron(np.eye(COLUMNS // 16), np.kron(h4, h4) / 4)  # of all groups of a row
    wanted = INTEGERS.astype(np.float64) @ whole * scales.reshape(-1, 1).astype(np.float64)
    assert source.decoded == {("int8_convrot", "F32"): 1}
    same(values_of(tensors["w.weight"]), wanted)
    same(values_of(tensors["w.weight"].slice_rows("v", 100, 130)), wanted[100:])


def mxfp8(scales: Array) -> dict[str, Entry]:
    return {
        "w.weight": ("F8_E4M3", CODES),
        "w.weight_scale": ("U8", swizzled(scales)),
        "w.comfy_quant": described("mxfp8", group_size=32),
    }


def nvfp4(codes: Array, scales: Array, factor: float) -> dict[str, Entry]:
    return {
        "w.weight": ("U8", codes[:, ::2] << 4 | codes[:, 1::2]),
        "w.weight_scale": ("F8_E4M3", swizzled(scales)),
        "w.weight_scale_2": number(factor),
    }


@pytest.mark.parametrize("least, dtype", [(100, "BF16"), (0, "F32")])
def test_mxfp8_has_powers_of_two_in_the_order_of_the_gpu(
    least: int, dtype: str, tmp_path: Path
) -> None:
    scales = RANDOM.integers(least, 140, (ROWS, COLUMNS // 32), np.uint8)
    scales[0, 0] = least
    _, tensors = decoded(save(tmp_path / "x", mxfp8(scales)))
    wanted = products(CODES, 1) * np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=1)
    assert tensors["w.weight"].dtype == dtype
    same(values_of(tensors["w.weight"]), wanted)
    same(values_of(tensors["w.weight"].slice_rows("v", 40, 129)), wanted[40:129])


def test_nvfp4_has_two_codes_in_a_byte_and_two_scales(tmp_path: Path) -> None:
    codes = RANDOM.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    scales = RANDOM.choice(np.array(FINITE, np.uint8), (ROWS, COLUMNS // 16)) & 127
    factor = rounded(0.00123)
    metadata = {METADATA: json.dumps({"layers": {"w": {"format": "nvfp4"}}})}
    path = save(tmp_path / "x", nvfp4(codes, scales, factor), metadata)
    _, tensors = decoded(path)
    wanted = [
        [
            rounded(
                rounded(float8(int(scales[r, c // 16])) * factor) * (-1) ** (v >> 3) * FP4[v & 7]
            )
            for c, v in enumerate(map(int, codes[r]))
        ]
        for r in range(ROWS)
    ]
    assert tensors["w.weight"].shape == (ROWS, COLUMNS) and tensors["w.weight"].dtype == "F32"
    same(values_of(tensors["w.weight"]), wanted)
    # a power of two keeps the products exact in BF16
    _, tensors = decoded(save(tmp_path / "y", nvfp4(codes, scales, 0.5), metadata))
    assert tensors["w.weight"].dtype == "BF16"


def test_a_description_may_lack_the_prefix_of_the_model(tmp_path: Path) -> None:
    entries = {f"model.diffusion_model.{name}": entry for name, entry in SCALED.items()}
    entries["model.diffusion_model.w.weight_scale"] = number(2)
    metadata = {METADATA: LAYERS}
    _, tensors = decoded(save(tmp_path / "x", entries, metadata))
    same(values_of(tensors["model.diffusion_model.w.weight"]), products(CODES, 2))


def test_a_file_without_codes_is_left_alone(tmp_path: Path) -> None:
    source = read_source(save(tmp_path / "x", {"w.weight": KEPT}))
    assert source.is_exact and not source.decoded and source.tensors[0].decoded is None


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_scale_may_be_a_shorter_float(dtype: str, tmp_path: Path) -> None:
    half = np.array(1.5, "<f2") if dtype == "F16" else np.array(0x3FC0, "<u2")
    entries = {**SCALED, "w.weight_scale": (dtype, half)}
    same(values_of(decoded(save(tmp_path / "x", entries))[1]["w.weight"]), products(CODES, 1.5))


def test_a_file_that_became_shorter_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"w.weight": ("F8_E4M3", CODES), "w.weight_scale": number(2)})
    tensor = decoded(path)[1]["w.weight"]
    path.write_bytes(path.read_bytes()[:-2])  # in the scale
    with pytest.raises(FormatError, match="truncated"):
        values_of(tensor)
    path = save(tmp_path / "y", {"w.weight": ("F8_E4M3", CODES)})
    tensor = decoded(path)[1]["w.weight"]
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ModelError, match="changed"):
        values_of(tensor)


def test_decoding_says_that_numpy_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "x", SCALED)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"needs the extra \[mlx\]"):
        read_source(path)


Change = Callable[[dict[str, Entry]], object]
LAYER: dict[str, Entry] = {
    **SCALED,
    "w.weight_scale": number(2),
    "w.comfy_quant": described("float8_e4m3fn"),
}
NAN = swizzled(np.full((ROWS, COLUMNS // 32), 255, np.uint8))
BAD: dict[str, tuple[dict[str, Entry | None], str]] = {
    "rotated": (
        {
            "w.weight": ("I8", INTEGERS),
            "w.comfy_quant": described("int8_tensorwise", convrot=True),
        },
        "is not a matrix in groups of 256",
    ),
    "rotated inside": ({"w.comfy_quant": described("nvfp4", params={"convrot": 1})}, "convrot"),
    "odd": (
        {"w.comfy_quant": described("int8_tensorwise", convrot=True, convrot_groupsize=[])},
        "convrot",
    ),
    "unknown": ({"w.comfy_quant": described("svd_w4a4")}, "unsupported format 'svd_w4a4'"),
    "no JSON": ({"w.comfy_quant": text(b"{")}, "JSON"),
    "no object": ({"w.comfy_quant": text([1])}, "has no format"),
    "long": ({"w.comfy_quant": ("U8", np.zeros(4097, np.uint8))}, "is not a text"),
    "no weight": ({"w.weight": None, "w.weight_scale": None}, "w is described as quantized"),
    "other codes": ({"w.weight": ("I8", INTEGERS)}, r"\(I8 \[130, 160\]\) does not have codes of"),
    "no scale": ({"w.weight_scale": None}, "has no weight_scale"),
    "two scales": ({"w.scale_weight": number(1)}, "has two scales"),
    "NaN": ({"w.weight_scale": number(np.nan)}, "is not finite"),
    "shape": ({"w.weight_scale": ("F32", np.ones(ROWS, "<f4"))}, "is not a scale of"),
    "integers": ({"w.weight_scale": ("I32", np.ones((), "<i4"))}, "is not a scale of"),
    "lone scale": ({"v.weight_scale": number(1)}, "v.weight_scale belongs to no quantized weight"),
    "blocks": ({"w.comfy_quant": described("mxfp8")}, r"mxfp8 needs \[256, 8\]"),
    "groups": ({"w.comfy_quant": described("mxfp8", group_size=16)}, "in groups of 16"),
    "infinite": (
        {"w.comfy_quant": described("mxfp8"), "w.weight_scale": ("U8", NAN)},
        "not finite, or too large",
    ),
    "one scale": (
        {
            "w.comfy_quant": described("nvfp4"),
            "w.weight": ("U8", CODES[:, :64]),
            "w.weight_scale": ("U8", NAN),
        },
        "has no weight_scale_2",
    ),
    "vector": ({"w.weight": ("U8", CODES[0]), "w.comfy_quant": described("nvfp4")}, "matrix"),
    "nunchaku": ({"w.qweight": KEPT}, "Nunchaku"),
    "smoothed": ({"w.pre_quant_scale": KEPT}, "pre_quant_scale"),
}


@pytest.mark.parametrize("case", BAD)
def test_other_quantized_files_are_refused(case: str, tmp_path: Path) -> None:
    changes, message = BAD[case]
    entries = {name: entry for name, entry in {**LAYER, **changes}.items() if entry is not None}
    with pytest.raises(FormatError, match=message):
        read_source(save(tmp_path / "x", entries))


@pytest.mark.parametrize("value", ["{", "[]", '{"layers": []}', '{"layers": {"z": {"format": 1}}}'])
def test_metadata_that_describe_nothing_are_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"_quantization_metadata|z is described"):
        read_source(save(tmp_path / "x", SCALED, {METADATA: value}))

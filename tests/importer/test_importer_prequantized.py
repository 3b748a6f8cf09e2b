"""Prequantized weights of three tools, and those that cannot be interpreted."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.tensor import parse_header, read_tensors
from tests.importer.test_importer_quantize import parts, quantized_by_mlx
from tests.importer.valued import as_dtype, bf16_values, blob_of, make_valued, read_back

STEM = "layers.0.attention.to_q"
NAME = f"{STEM}.weight"
SHAPE = (16, 64)
VALUES = bf16_values("source", SHAPE)
REST = as_dtype({"layers.0.norm.weight": bf16_values("norm", (64,))}, "BF16")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def packed(
    tmp_path: Path, tensors: Any, config: dict[Any, Any] | None = None, **recipe: Any
) -> tuple[Any, ...]:
    """Pack a model of these transformer tensors; return it and the parsed blob of NAME."""
    model = make_valued(tmp_path / "model", transformer=tensors | REST)
    if config is not None:
        model.write("transformer/config.json", config)
    made = model.make(**recipe)
    raw = blob_of(model.store, made.aimage, f"transformer/{NAME}")
    return made, raw, *parts(raw)


def refused(tmp_path: Path, tensors: Any, config: Any, *said: str) -> None:
    model = make_valued(tmp_path / "model", transformer=tensors | REST)
    if config is not None:
        model.write("transformer/config.json", config)
    with pytest.raises(FormatError) as caught:
        model.make()
    for word in said:
        assert word in caught.value.message + str(caught.value.hint)
    assert caught.value.exit_code == 5
    assert not model.store.exists()


# -- MLX


def mlx(kind: str, dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, int], Any]]:
    """Return weights as saved by MLX-LM."""
    codes, scales, *biases = quantized_by_mlx(VALUES, dtype, kind, None)
    group = {"int4": 64, "int8": 64, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32}[kind]
    word = 8 if kind.endswith("4") else 4
    rows = (16, 64 // group)
    made = {NAME: ("U32", (16, 64 // word), codes)}
    made[f"{STEM}.scales"] = (dtype if biases else "U8", rows, scales)
    if biases:
        made[f"{STEM}.biases"] = (dtype, rows, biases[0])
    return made


CONFIGS: dict[str, dict[str, Any]] = {
    "int4": {"group_size": 64, "bits": 4},
    "int8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


@pytest.mark.parametrize(
    ("kind", "key"), list(zip(CONFIGS, ["quantization", "quantization_config"] * 3, strict=False))
)
def test_mlx_weights_are_kept_unchanged(tmp_path: Path, kind: Any, key: Any) -> None:
    made, _, metadata, found = packed(tmp_path, mlx(kind), {key: CONFIGS[kind]})
    group_size = str(CONFIGS[kind]["group_size"])
    assert metadata == {"quant_type": kind, "group_size": group_size}
    source = list(mlx(kind).values())
    assert list(found.values()) == source
    assert list(found) == [NAME, f"{NAME}.scale", f"{NAME}.bias"][: len(source)]
    layer = made.aimage.get_layer(f"transformer/{NAME}")
    assert (layer.dtype, layer.shape) == (kind, SHAPE)
    assert made.report.quantized["transformer"] == {
        "type": kind,
        "group_size": int(group_size),
        "tensors": 1,
        "kept": {"as in the source": 1},
    }


def test_mlx_weights_equal_those_quantized_here(tmp_path: Path) -> None:
    plain = as_dtype({NAME: VALUES}, "BF16")
    ours = make_valued(tmp_path / "ours" / "model", transformer=plain | REST)
    made = ours.make(quantize="int8")
    _, raw, _, _ = packed(tmp_path, mlx("int8"), {"quantization": CONFIGS["int8"]})
    assert blob_of(ours.store, made.aimage, f"transformer/{NAME}") == raw


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "has no bits and group_size"),
        ({"quantization": [64, 4]}, "has no bits and group_size"),
        ({"quantization": {"bits": 4}}, "has no bits and group_size"),
        ({"quantization": {"group_size": 64, "bits": True}}, "True bits"),
        ({"quantization": {"group_size": 64, "bits": 4, "mode": ["affine"]}}, "affine"),
        ({"quantization": {"group_size": 48, "bits": 4}}, "group size"),
        ({"quantization": {"group_size": "64x", "bits": 4}}, "group size"),
        ({"quantization": {"group_size": 32, "bits": 4}}, "does not match int4 in groups of 32"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "does not match mxfp4"),
    ],
    ids=str,
)
def test_mlx_weights_that_contradict_their_config_are_refused(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    refused(tmp_path, mlx("int4"), config, said)


@pytest.mark.parametrize(
    ("kind", "rest", "own", "size"),
    [
        ("int8", CONFIGS["mxfp4"], {"bits": 8}, 64),
        ("int4", {"group_size": 32, "bits": 8}, {"bits": 4}, 64),
        ("nvfp4", CONFIGS["mxfp8"], {"bits": 4, "mode": "nvfp4", "group_size": 16}, 16),
        ("mxfp8", CONFIGS["mxfp8"], False, 32),
    ],
    ids=str,
)
def test_an_entry_of_a_module_takes_precedence(
    tmp_path: Path, kind: str, rest: dict[str, Any], own: dict[str, Any] | bool, size: int
) -> None:
    """Such an entry is complete: it inherits neither the mode nor the group size."""
    _, _, metadata, _ = packed(tmp_path, mlx(kind), {"quantization": rest | {STEM: own}})
    assert metadata == {"quant_type": kind, "group_size": str(size)}


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, "has no bits and group_size"),
        ({"bits": 5}, "5 bits"),
        ({"bits": 4, "group_size": None}, "group size"),
    ],
    ids=str,
)
def test_a_mismatched_entry_of_a_module_is_refused(
    tmp_path: Path, own: dict[str, Any], said: str
) -> None:
    refused(tmp_path, mlx("int4"), {"quantization": CONFIGS["int4"] | {STEM: own}}, said)


@pytest.mark.parametrize("shape", [(), (16, 5)], ids=str)
def test_an_ambiguous_group_size_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scales = ("BF16", shape, bytes(2 * math.prod(shape)))
    tensors = mlx("int8") | {f"{STEM}.scales": scales, f"{STEM}.biases": scales}
    refused(tmp_path, tensors, {"quantization": CONFIGS["int4"] | {STEM: {"bits": 8}}}, "int8")


@pytest.mark.parametrize(
    "change",
    [
        {f"{STEM}.scales": ("BF16", (16, 2), bytes(64))},
        {f"{STEM}.scales": ("I16", (16, 1), bytes(32))},
        {NAME: ("U32", (), bytes(4))},
    ],
    ids=["scales", "dtype", "a number"],
)
def test_mlx_of_other_shapes_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    refused(
        tmp_path, mlx("int4") | change, {"quantization": CONFIGS["int4"]}, "does not match int4"
    )


def test_mlx_without_biases_is_refused(tmp_path: Path) -> None:
    tensors = mlx("int4")
    del tensors[f"{STEM}.biases"]
    refused(tmp_path, tensors, {"quantization": CONFIGS["int4"]}, "does not match int4")


# -- nvfp4 of ModelOpt and compressed-tensors


def nvfp4() -> tuple[bytes, bytes, Any]:
    """Return random codes (16, 64) in 0..15, positive E4M3 scales (16, 4), and their values."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, SHAPE, dtype=np.uint8)
    scales = rng.integers(8, 0x7E, (16, 4), dtype=np.uint8)
    bytes_ = codes[:, ::2] | codes[:, 1::2] << 4  # the first value in the low half
    exponent, fraction = (scales >> 3).astype(int), (scales & 7) / 8
    scale = (1 + fraction) * 2.0 ** (exponent - 7)
    values = np.array(E2M1)[codes & 7] * np.where(codes & 8, -1, 1)
    return bytes_.tobytes(), scales.tobytes(), values * np.repeat(scale, 16, axis=1)


def dequantized(found: Any) -> np.ndarray:
    """Return the values of a blob, dequantized by MLX and the factor."""
    from clowder_aimage.model.backend import mx

    codes = mx.array(np.frombuffer(found[NAME][2], np.uint32).reshape(16, 8))
    scales = mx.array(np.frombuffer(found[f"{NAME}.scale"][2], np.uint8).reshape(16, 4))
    plain = mx.dequantize(codes, scales, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32)
    factor = np.frombuffer(found[f"{NAME}.global_scale"][2], np.float32)
    return np.array(plain) * factor


def modelopt(factor: bytes, shape: tuple[int, ...] = (), dtype: str = "F32") -> dict[Any, Any]:
    codes, scales, _ = nvfp4()
    return {
        NAME: ("U8", (16, 32), codes),
        f"{NAME}_scale": ("F8_E4M3", (16, 4), scales),
        f"{NAME}_scale_2": (dtype, shape, factor),
        f"{STEM}.input_scale": ("F32", (), struct.pack("<f", 3)),
    }


def compressed(divisor: bytes, shape: tuple[int] = (1,), dtype: str = "F32") -> dict[Any, Any]:
    codes, scales, _ = nvfp4()
    return {
        f"{NAME}_packed": ("U8", (16, 32), codes),
        f"{NAME}_scale": ("F8_E4M3", (16, 4), scales),
        f"{NAME}_global_scale": (dtype, shape, divisor),
        f"{STEM}.input_global_scale": ("F32", (1,), struct.pack("<f", 3)),
    }


@pytest.mark.parametrize(
    ("tensors", "factor"),
    [
        (modelopt(struct.pack("<f", 0.1), (1,)), 0.1),
        (modelopt(struct.pack("<e", 0.125), dtype="F16"), 0.125),
        (compressed(struct.pack("<f", 3.0)), 1 / 3),
        (compressed(struct.pack("<H", 0x4100), dtype="BF16"), 0.125),
    ],
    ids=["modelopt", "F16", "compressed", "divisor in BF16"],
)
def test_nvfp4_of_other_tools_is_converted(tmp_path: Path, tensors: Any, factor: float) -> None:
    made, raw, metadata, found = packed(tmp_path, tensors)
    assert metadata == {"quant_type": "nvfp4", "group_size": "16"}
    assert list(found) == [NAME, f"{NAME}.scale", f"{NAME}.global_scale"]
    assert found[NAME][:2] == ("U32", (16, 8))
    assert found[f"{NAME}.scale"][:2] == ("U8", (16, 4))
    assert found[f"{NAME}.global_scale"][0] == "F32"
    np.testing.assert_allclose(dequantized(found), nvfp4()[2] * factor, rtol=1e-6)
    size = int.from_bytes(raw[:8], "little")
    (tensor,) = read_tensors(parse_header(raw[8 : 8 + size], len(raw) - 8 - size)).values()
    assert (tensor.dtype, tensor.shape) == ("nvfp4", SHAPE)
    assert made.report.ignored == 1
    assert not [layer.name for layer in made.aimage.layers if layer.name.endswith("_scale")]


@pytest.mark.parametrize("value", [-1.0, float("nan"), 1e-45])
def test_a_divisor_must_be_positive_and_finite(tmp_path: Path, value: float) -> None:
    refused(tmp_path, compressed(struct.pack("<f", value)), None, "global scale")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{NAME}_scale_2": None}, "unsupported quantization"),
        ({f"{NAME}_scale": ("F32", (), struct.pack("<f", 1))}, "unsupported quantization"),
        ({f"{NAME}_scale_2": ("F32", (5,), bytes(20))}, "does not match nvfp4"),
        ({NAME: ("U8", (16, 30), bytes(480))}, "does not match nvfp4"),
    ],
    ids=str,
)
def test_mismatched_modelopt_weights_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    tensors = {k: v for k, v in (modelopt(struct.pack("<f", 1)) | change).items() if v}
    refused(tmp_path, tensors, None, said)


@pytest.mark.parametrize(
    "change",
    [{f"{NAME}_packed": ("I32", (16, 8), bytes(512))}, {f"{NAME}_scale": None}],
    ids=["int4", "no scale"],
)
def test_unsupported_compressed_tensors_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    tensors = {k: v for k, v in (compressed(struct.pack("<f", 1)) | change).items() if v}
    refused(tmp_path, tensors, None, "unsupported quantization", "compressed-tensors")


def test_a_tensor_in_two_formats_is_refused(tmp_path: Path) -> None:
    tensors = compressed(struct.pack("<f", 1)) | as_dtype({NAME: VALUES}, "BF16")
    refused(tmp_path, tensors, None, "both quantized and unquantized")


def test_quantizing_twice_is_refused(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model", transformer=mlx("int4") | REST)
    model.write("transformer/config.json", {"quantization": CONFIGS["int4"]})
    with pytest.raises(UsageError, match="1 tensor of the transformer is already quantized"):
        model.make(quantize="int8")
    assert not model.store.exists()
    assert read_back(model.store, "m") if model.make(quantize="text_encoder=int8") else False


def test_scales_without_quantized_weights_are_tensors(tmp_path: Path) -> None:
    """Only companions of quantized weights are omitted."""
    extra = {f"{STEM}.input_scale": ("F32", (), struct.pack("<f", 3))}
    plain = as_dtype({NAME: VALUES}, "BF16")
    made, *_ = packed(tmp_path, plain | extra)
    assert made.report.ignored == 0
    assert made.aimage.get_layer(f"transformer/{STEM}.input_scale").dtype == "F32"

"""Quantization by create: selected tensors, exact bytes, and reproducibility."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.importer import Recipe, blob_encoder, blob_writer
from clowder_aimage.importer.quantizer import Quantizer
from clowder_aimage.model.backend import mx
from clowder_aimage.tensor import (
    DTYPE_BITS,
    QUANT_TYPES,
    Quantization,
    parse_header,
    read_tensors,
)
from tests.importer.conftest import data_of
from tests.importer.valued import (
    KEPT,
    ValuedModel,
    as_dtype,
    bf16_values,
    blob_of,
    make_valued,
    read_back,
    transformer,
)

REASONS = {
    "1 dimension": 1,
    "embedder": 3,
    "final layer": 2,
    "norm": 2,
    "pad token": 1,
    "rows no multiple of 64": 1,
    "under 1024 elements": 1,
}
TYPES = ["int4", "int8", "nvfp4", "mxfp8"]
MLX = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


@pytest.fixture
def model(tmp_path: Path) -> ValuedModel:
    """Return a model in BF16."""
    return make_valued(tmp_path / "model")


def parts(raw: bytes) -> tuple[Any, dict[Any, tuple[Any, tuple[Any, ...], bytes]]]:
    """Return a blob's header metadata, and its tensors by key in order, by another parser."""
    size = int.from_bytes(raw[:8], "little")
    metadata = json.loads(raw[8 : 8 + size]).get("__metadata__", {})
    found = {}
    for key, info in safetensors.deserialize(raw):
        found[key] = (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
    order = [key for key in json.loads(raw[8 : 8 + size]) if key != "__metadata__"]
    return metadata, {key: found[key] for key in order}


def bits(array: mx.array) -> bytes:
    width = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.itemsize]
    return np.array(array.view(width)).tobytes()


def quantized_by_mlx(values: Any, dtype: str, kind: str, group_size: int | None) -> list[Any]:
    """Return MLX's result for the whole matrix at once."""
    quantization = Quantization.parse(kind, group_size)
    return [
        bits(array)
        for array in mx.quantize(
            mx.array(values).astype(MLX[dtype]),
            group_size=quantization.group_size,
            bits=quantization.type.bits,
            mode=quantization.type.mode,
            stream=mx.cpu,
        )
    ]


# -- selection


def test_only_matrices_of_the_blocks_are_quantized(model: ValuedModel) -> None:
    packed = model.make(quantize="int8")
    quantized = {layer.name for layer in packed.aimage.layers if layer.dtype == "int8"}
    wanted = {f"transformer/{name}" for name in transformer().keys() - KEPT.keys()}
    assert quantized == wanted
    assert packed.report.quantized == {
        "transformer": {
            "type": "int8",
            "group_size": 64,
            "tensors": len(wanted),
            "kept": REASONS,
        }
    }


def test_the_config_states_the_quantization(model: ValuedModel) -> None:
    packed = model.make(quantize="transformer=int4,text_encoder=int8", group_size=32)
    config = packed.aimage.properties
    validate("aimage-config", config)
    components = config["components"]
    assert components["transformer"]["dtype"] == "int4"
    assert components["transformer"]["quantization"]["type"] == "int4"
    assert components["transformer"]["quantization"]["group_size"] == 32
    assert components["transformer"]["parameters"] == sum(v.size for v in transformer().values())
    assert components["text_encoder"]["quantization"] == {
        "type": "int8",
        "group_size": 32,
        "tensors": 1,
        "kept": {"embedder": 1, "norm": 2},
    }
    assert "quantization" not in components["vae"]
    for name, component in components.items():
        own = packed.aimage.list_layers(name)
        assert component["size"] == sum(layer.descriptor.size for layer in own)


def test_every_dtype_is_in_the_schema() -> None:
    path = Path(__file__).parents[2] / "schemas" / "layer-annotations.schema.json"
    schema = json.loads(path.read_text())
    assert sorted(schema["$defs"]["dtype"]["enum"]) == sorted([*DTYPE_BITS, *QUANT_TYPES])


@pytest.mark.parametrize("dtype", ["F64", "F4", "F8_E4M3", "BOOL", "U32"])
def test_a_model_of_any_dtype_can_be_packed(tmp_path: Path, dtype: str) -> None:
    shape = (64, 64)
    name = "layers.0.large.weight"
    tensors = {name: (dtype, shape, bytes(64 * 64 * DTYPE_BITS[dtype] // 8))}
    model = make_valued(tmp_path / "model", transformer=tensors)
    if dtype == "U32":  # codes without scales
        with pytest.raises(FormatError):
            model.make()
        return
    config = model.make().aimage.properties
    assert config["components"]["transformer"]["dtype"] == dtype


# -- bytes


@pytest.mark.parametrize(
    ("kind", "dtype"), list(zip(TYPES, ["F32", "F16", "BF16", "F32"], strict=True))
)
def test_a_quantized_blob_combines_codes_scales_and_biases(
    tmp_path: Path, kind: Any, dtype: Any
) -> None:
    model = make_valued(tmp_path / "model", dtype)
    model.make(quantize=kind)
    name = "noise_refiner.0.feed_forward.w2.weight"
    values = transformer()[name]
    aimage = read_back(model.store)
    layer = aimage.get_layer(f"transformer/{name}")
    raw = blob_of(model.store, aimage, layer.name)
    assert (layer.dtype, layer.shape) == (kind, values.shape)
    quantization = Quantization.parse(kind)
    metadata, found = parts(raw)
    assert metadata == {"quant_type": kind, "group_size": str(quantization.group_size)}
    suffixes = ["", ".scale", ".bias"][: 3 if quantization.type.has_bias else 2]
    assert list(found) == [name + suffix for suffix in suffixes]
    expected = quantized_by_mlx(values, dtype, kind, None)
    for suffix, data in zip(suffixes, expected, strict=True):
        scales = dtype if quantization.type.has_bias else "U8"
        shape = quantization.compute_scales_shape(values.shape)
        if not suffix:
            scales, shape = "U32", quantization.compute_codes_shape(values.shape)
        assert found[name + suffix] == (scales, shape, data)
    size = int.from_bytes(raw[:8], "little")
    (tensor,) = read_tensors(parse_header(raw[8 : 8 + size], len(raw) - 8 - size)).values()
    assert (tensor.dtype, tensor.shape, tensor.quantization) == (kind, values.shape, quantization)


def test_codes_decode_to_the_values(model: ValuedModel) -> None:
    """Within half a step, decoded by the format's definition without MLX.

    BF16 scales and biases have a relative error of up to 2**-9, and 255 steps add half a step for
    each.
    """
    model.make(quantize="int8")
    for name in ("layers.0.attention.to_q.weight", "layers.0.adaLN_modulation.0.weight"):
        _, found = parts(blob_of(model.store, read_back(model.store), f"transformer/{name}"))
        values = transformer()[name]
        codes = np.frombuffer(found[name][2], np.uint8).reshape(values.shape).astype(np.float64)
        scale, bias = (
            np.repeat(
                (np.frombuffer(found[name + suffix][2], "<u2").astype(np.uint32) << 16)
                .view(np.float32)
                .reshape(values.shape[0], -1),
                64,
                axis=1,
            )
            for suffix in (".scale", ".bias")
        )
        steps = np.abs(codes * scale + bias - values) / np.abs(scale)
        assert steps.max() < 1.5
        assert np.median(steps) < 0.5


def test_aliases_give_the_same_types() -> None:
    assert Recipe.parse(quantize="q8,text_encoder=q4") == Recipe.parse(
        quantize="INT8,text_encoder=int4"
    )


@pytest.mark.parametrize(("kind", "size"), [("int4", 32), ("int8", 128)])
def test_other_group_sizes_are_supported(tmp_path: Path, kind: str, size: int) -> None:
    name = "layers.0.wide.weight"
    values = bf16_values("wide", (16, 256))
    model = make_valued(tmp_path / "model", transformer=as_dtype({name: values}, "BF16"))
    model.make(quantize=kind, group_size=size)
    aimage = read_back(model.store)
    metadata, found = parts(blob_of(model.store, aimage, f"transformer/{name}"))
    assert metadata["group_size"] == str(size)
    assert found[f"{name}.scale"][1] == (16, 256 // size)
    expected = quantized_by_mlx(values, "BF16", kind, size)
    assert [data for _, _, data in found.values()] == expected


# -- reproducibility


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_the_digest_is_independent_of_threads_and_blocks(
    model: ValuedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    digest = model.recipe_digest(quantize=kind, jobs=1)
    assert model.recipe_digest(quantize=kind, jobs=16) == digest
    for block, buffer in ((300, 4096), (64 * 64, 1000)):
        monkeypatch.setattr(blob_encoder, "BLOCK", block)
        monkeypatch.setattr(blob_writer, "MIN_BUFFER", buffer)
        monkeypatch.setattr(blob_writer, "BUFFER", buffer)
        assert model.recipe_digest(quantize=kind, jobs=3) == digest


@pytest.mark.parametrize("kind", ["int8", "nvfp4"])
def test_f32_and_bf16_give_the_same_codes(tmp_path: Path, kind: str) -> None:
    found = []
    for dtype in ("F32", "BF16"):
        model = make_valued(tmp_path / dtype / "model", dtype)
        model.make(quantize=kind)
        aimage = read_back(model.store)
        found.append(
            {
                layer.name: parts(blob_of(model.store, aimage, layer.name))[1]
                for layer in aimage.layers
                if layer.dtype == kind
            }
        )
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        key = name.removeprefix("transformer/")
        assert one[key] == found[1][name][key]


@pytest.mark.parametrize("kind", ["int4", "mxfp8"])
def test_a_row_longer_than_a_block_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is split between groups: the codes equal those of the whole row, in bounded memory."""
    name = "layers.0.wide.weight"
    values = bf16_values("wide", (2, 4096))
    model = make_valued(tmp_path / "model", transformer=as_dtype({name: values}, "BF16"))
    sizes = []
    real = Quantizer.quantize

    def spy(self: Quantizer, rows: Any, *others: Any) -> tuple[bytes, ...]:
        sizes.append(rows.nbytes)
        return real(self, rows, *others)

    monkeypatch.setattr(Quantizer, "quantize", spy)
    monkeypatch.setattr(blob_encoder, "BLOCK", 1000)
    model.make(quantize=kind)
    assert len(sizes) > 16
    assert max(sizes) <= 1000
    aimage = read_back(model.store)
    _, found = parts(blob_of(model.store, aimage, f"transformer/{name}"))
    expected = quantized_by_mlx(values, "BF16", kind, None)
    assert [data for _, _, data in found.values()] == expected


def test_an_odd_number_of_nvfp4_groups_is_quantized(tmp_path: Path) -> None:
    """MLX processes nvfp4 groups in pairs."""
    name, shape = "layers.0.narrow.weight", (65, 16)
    values = bf16_values("narrow", shape)
    model = make_valued(tmp_path / "model", transformer=as_dtype({name: values}, "BF16"))
    model.make(quantize="nvfp4")
    _, found = parts(blob_of(model.store, read_back(model.store), f"transformer/{name}"))
    padded = np.concatenate([values, np.zeros((1, 16), np.float32)]).reshape(33, 32)
    codes, scales = quantized_by_mlx(padded, "BF16", "nvfp4", None)
    assert [data for _, _, data in found.values()] == [codes[: 65 * 8], scales[:65]]


def test_auto_gives_the_same_quantized_blobs_from_f32_and_bf16(tmp_path: Path) -> None:
    f32 = make_valued(tmp_path / "f32", "F32").recipe_digest(dtype="auto", quantize="int4")
    bf16 = make_valued(tmp_path / "bf16", "BF16").recipe_digest(quantize="int4")
    assert f32 == bf16


def test_models_share_unquantized_tensors(model: ValuedModel) -> None:
    plain = model.make("plain")
    quantized = model.make("quantized", quantize="int8")
    shared = {written.layer.name for written in quantized.layers if written.existed}
    changed = {layer.name for layer in quantized.aimage.layers if layer.dtype == "int8"}
    assert shared == {layer.name for layer in plain.aimage.layers} - changed
    again = model.make("again", quantize="int8")
    assert all(written.existed for written in again.layers)


# -- refusals


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quantize": "transformer=int8,vae=int4"}, "the vae cannot be quantized"),
        ({"quantize": "scheduler=int8"}, "'scheduler' cannot be quantized"),
        ({"quantize": "mxfp4"}, "cannot quantize to 'mxfp4'"),
        ({"quantize": "int8,"}, "cannot quantize to ''"),
        ({"quantize": "int8,transformer=int8"}, "duplicate quantization"),
        ({"quantize": "int8", "group_size": 16}, "group size"),
        ({"quantize": "nvfp4", "group_size": 16}, "a group size requires int4 or int8"),
        ({"group_size": 64}, "a group size requires"),
    ],
    ids=str,
)
def test_recipe_parse_refuses(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe.parse(**given)
    assert said in caught.value.message


def test_a_group_size_applies_to_types_that_support_it() -> None:
    recipe = Recipe.parse(quantize="transformer=nvfp4, text_encoder=int4", group_size=128)
    sizes = {name: one.group_size for name, one in recipe.quantize.items()}
    assert sizes == {"transformer": 16, "text_encoder": 128}


def test_a_group_size_that_divides_no_row_is_refused(model: ValuedModel) -> None:
    with pytest.raises(UsageError, match="no tensor of the transformer can be quantized") as caught:
        model.make(quantize="int8", group_size=128)
    assert "another group size" in str(caught.value.hint)
    assert not model.store.exists()


@pytest.mark.parametrize(
    ("stored", "kind", "reason"),
    [
        (("F8_E4M3", (64, 64), bytes(4096)), "int8", "F8_E4M3 values"),
        (("BF16", (64, 24), bytes(3072)), "nvfp4", "rows no multiple of 16"),
        (("BF16", (8, 8, 64), bytes(8192)), "int4", "3 dimensions"),
    ],
    ids=str,
)
def test_the_hint_names_the_most_frequent_reason(
    tmp_path: Path, stored: tuple[str, tuple[int, ...], bytes], kind: str, reason: str
) -> None:
    """The reason for most values is given; norms are more numerous, but small."""
    norms = {f"layers.{i}.norm.weight": bf16_values("n", (64,)) for i in range(9)}
    tensors = {"layers.0.to_q.weight": stored} | as_dtype(norms, "BF16")
    model = make_valued(tmp_path / "model", transformer=tensors)
    with pytest.raises(UsageError, match="no tensor of the transformer") as caught:
        model.make(quantize=kind)
    assert caught.value.hint == f"most of its values are not quantized because of: {reason}"


def test_only_rows_divisible_by_the_group_size_are_quantized(tmp_path: Path) -> None:
    values = transformer() | {"layers.0.wide.weight": bf16_values("wide", (16, 128))}
    model = make_valued(tmp_path / "model", transformer=as_dtype(values, "BF16"))
    packed = model.make(quantize="int8", group_size=128)
    names = [layer.name for layer in packed.aimage.layers if layer.dtype == "int8"]
    assert names == ["transformer/layers.0.wide.weight"]


def test_tensors_that_are_not_floats_are_kept(tmp_path: Path) -> None:
    shape = (64, 64)
    name = "layers.0.table.weight"
    data = data_of((name, "I8", shape), "x")
    tensors = as_dtype(transformer(), "BF16") | {name: ("I8", shape, data)}
    packed = make_valued(tmp_path / "model", transformer=tensors).make(quantize="int8")
    assert packed.report.quantized["transformer"]["kept"]["I8 values"] == 1

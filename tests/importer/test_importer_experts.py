"""Experts of a layer share a blob, named by their prefix and read by its header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.importer import Recipe
from clowder_aimage.importer.recipe import find_expert_group
from clowder_aimage.tensor import Header, parse_header, read_tensors
from tests.importer.test_importer_quantize import parts, quantized_by_mlx
from tests.importer.valued import (
    Stored,
    ValuedModel,
    as_dtype,
    bf16_values,
    blob_of,
    make_valued,
    read_back,
)

PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def moe(experts: int = 3, layers: int = 2, shape: tuple[int, int] = (64, 64)) -> dict[Any, Any]:
    """Return the tensors of a Qwen3-MoE text encoder in a random order."""
    names = [
        f"model.layers.{layer}.mlp.{group}{part}"
        for layer in range(layers)
        for group in (*(f"experts.{n}." for n in reversed(range(experts))), "shared_experts.")
        for part in PARTS
    ]
    names += [f"model.layers.{layer}.mlp.gate.weight" for layer in range(layers)]
    names += ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    return {name: bf16_values(name, shape) for name in names}


@pytest.fixture
def model(tmp_path: Path) -> ValuedModel:
    return make_valued(tmp_path / "model", text_encoder=as_dtype(moe(), "BF16"))


def header_of(raw: bytes) -> Header:
    size = int.from_bytes(raw[:8], "little")
    return parse_header(raw[8 : 8 + size], len(raw) - 8 - size)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("layers.12.mlp.experts.127.up_proj.weight", "layers.12.mlp.experts"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.mlp.shared_experts"),
        ("layers.3.block_sparse_moe.experts.7.w1.weight", "layers.3.block_sparse_moe.experts"),
        ("model.layers.1.mlp.shared_expert_gate.weight", None),
        ("model.experts.0.weight", None),
    ],
)
def test_expert_group_is_the_common_prefix(name: str, group: str | None) -> None:
    assert find_expert_group(name) == group


def test_a_group_is_one_layer_with_sorted_members(model: ValuedModel) -> None:
    model.make()
    aimage = read_back(model.store)
    names = {layer.name for layer in aimage.list_layers("text_encoder") if layer.is_tensor}
    kinds = ("experts", "shared_experts")
    groups = {f"model.layers.{n}.mlp.{kind}" for n in (0, 1) for kind in kinds}
    alone = {name for name in moe() if find_expert_group(name) is None}
    assert names == {f"text_encoder/{name}" for name in groups | alone}
    layer = aimage.get_layer("text_encoder/model.layers.1.mlp.experts")
    assert (layer.dtype, layer.shape) == (None, None)
    metadata, found = parts(blob_of(model.store, aimage, layer.name))
    assert metadata == {}
    assert list(found) == sorted(name for name in moe() if "layers.1.mlp.experts." in name)
    for name, (dtype, shape, data) in found.items():
        bits = (moe()[name].view(np.uint32) >> 16).astype("<u2").tobytes()
        assert (dtype, shape, data) == ("BF16", (64, 64), bits)


def test_mixtral_experts_are_grouped(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts"
    values = {f"{name}.{n}.{w}.weight": bf16_values(f"{n}{w}", (8, 8)) for n in "01" for w in "ab"}
    model = make_valued(tmp_path / "model", text_encoder=as_dtype(values, "BF16"))
    model.make()
    raw = blob_of(model.store, read_back(model.store), f"text_encoder/{name}")
    assert list(parts(raw)[1]) == sorted(values)


def test_the_numbers_count_tensors_and_not_blobs(model: ValuedModel) -> None:
    packed = model.make(quantize="text_encoder=int8")
    config = packed.aimage.properties["components"]["text_encoder"]
    assert config["tensors"] == len(moe())
    assert config["parameters"] == len(moe()) * 64 * 64
    assert config["quantization"]["tensors"] == 2 * 4 * 3 + 1
    assert config["quantization"]["kept"] == {"embedder": 1, "router": 2}
    assert config["dtype"] == "int8"


def test_quantized_groups_of_one_kind_declare_it_once(model: ValuedModel) -> None:
    model.make(quantize="text_encoder=int4")
    aimage = read_back(model.store)
    raw = blob_of(model.store, aimage, "text_encoder/model.layers.0.mlp.experts")
    metadata, found = parts(raw)
    assert metadata == {"quant_type": "int4", "group_size": "64"}
    members = sorted(name for name in moe() if "layers.0.mlp.experts." in name)
    assert list(found) == [name + end for name in members for end in ("", ".scale", ".bias")]
    for name in members:
        expected = quantized_by_mlx(moe()[name], "BF16", "int4", None)
        assert [found[name + end][2] for end in ("", ".scale", ".bias")] == expected
    tensors = read_tensors(header_of(raw))
    assert {tensor.dtype for tensor in tensors.values()} == {"int4"}


def test_unquantized_members_are_stored_beside_quantized_ones(tmp_path: Path) -> None:
    values = moe(experts=1, layers=1)
    odd = "model.layers.0.mlp.experts.0.down_proj.weight"
    values[odd] = bf16_values(odd, (64, 24))
    model = make_valued(tmp_path / "model", text_encoder=as_dtype(values, "BF16"))
    model.make(quantize="text_encoder=int8")
    aimage = read_back(model.store)
    tensors = read_tensors(
        header_of(blob_of(model.store, aimage, "text_encoder/model.layers.0.mlp.experts"))
    )
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        name: "BF16" if name == odd else "int8" for name in values if "mlp.experts." in name
    }


def test_members_of_several_kinds_declare_it_each(tmp_path: Path) -> None:
    """MLX weights with one 8-bit expert among 4-bit ones."""
    values = moe(experts=2, layers=1)
    tensors: dict[str, Stored] = {}
    precise = "model.layers.0.mlp.experts.1.up_proj"
    for name, value in values.items():
        stem = name.removesuffix(".weight")
        if ".experts." not in name:
            tensors |= as_dtype({name: value}, "BF16")
            continue
        kind = "int8" if stem == precise else "int4"
        codes, scales, biases = quantized_by_mlx(value, "BF16", kind, None)
        tensors[name] = ("U32", (64, 16 if kind == "int8" else 8), codes)
        tensors[f"{stem}.scales"] = ("BF16", (64, 1), scales)
        tensors[f"{stem}.biases"] = ("BF16", (64, 1), biases)
    model = make_valued(tmp_path / "model", text_encoder=tensors)
    stated = {"group_size": 64, "bits": 4, precise: {"group_size": 64, "bits": 8}}
    model.write("text_encoder/config.json", {"quantization": stated})
    packed = model.make()
    raw = blob_of(model.store, packed.aimage, "text_encoder/model.layers.0.mlp.experts")
    metadata, _ = parts(raw)
    assert metadata[f"{precise}.weight.quant_type"] == "int8"
    assert "quant_type" not in metadata
    found = {name: tensor.dtype for name, tensor in read_tensors(header_of(raw)).items()}
    assert found.pop(f"{precise}.weight") == "int8"
    assert set(found.values()) == {"int4"}
    facts = packed.report.quantized["text_encoder"]
    assert facts["type"] == "mixed"
    assert facts["tensors"] == 6
    assert json.loads(packed.aimage.config)["components"]["text_encoder"]["quantization"] == facts


def test_a_group_is_converted_as_a_whole(model: ValuedModel) -> None:
    from clowder_aimage.create import convert
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.oci import Reference

    model.make("plain")
    store = ImageLayout(model.store)
    recipe = Recipe.parse(quantize="text_encoder=int4")
    made = convert(store, Reference.parse("plain"), Reference.parse("new"), recipe)
    assert str(made.descriptor.digest) == model.recipe_digest(quantize="text_encoder=int4")

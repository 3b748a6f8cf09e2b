"""Mixtures of experts read back from packed blobs: every tensor, by MLX and without it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.model.backend import mx
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import mediatype
from clowder_aimage.tensor import Quantization
from tests.model.model_blobs import FolderStore
from tests.model.quantized_blobs import Part, bits, blob, judge, quantize

Arrays = dict[str, np.ndarray]
HIDDEN, INTER, EXPERTS, LAYERS = 64, 128, 4, 2


def array(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Random numbers that BF16 holds exactly."""
    found = random.standard_normal(shape).astype(np.float32)
    return (found.view(np.uint32) & 0xFFFF0000).view(np.float32)


def qwen3_moe() -> Arrays:
    """Return a Qwen3-MoE checkpoint with shared experts as other families have them.

    The experts of one layer are stacked, as MLX does it.
    """
    random, found = np.random.RandomState(0), {}
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        found[f"{path}.input_layernorm.weight"] = array(random, HIDDEN)
        found[f"{path}.self_attn.q_proj.weight"] = array(random, HIDDEN, HIDDEN)
        found[f"{path}.mlp.gate.weight"] = array(random, EXPERTS, HIDDEN)
        places = [f"experts.{expert}" for expert in range(EXPERTS)] + ["shared_experts"]
        for place in places:
            found[f"{path}.mlp.{place}.gate_proj.weight"] = array(random, INTER, HIDDEN)
            found[f"{path}.mlp.{place}.up_proj.weight"] = array(random, INTER, HIDDEN)
            found[f"{path}.mlp.{place}.down_proj.weight"] = array(random, HIDDEN, INTER)
    for name in ("gate_proj", "up_proj"):
        stacked = array(random, EXPERTS, INTER, HIDDEN)
        found[f"model.layers.{LAYERS}.mlp.switch_mlp.{name}.weight"] = stacked
    return found


def mixtral() -> Arrays:
    """Mixtral's names: its experts are not where groups are made, so each is a blob."""
    random, found = np.random.RandomState(1), {}
    for expert in range(EXPERTS):
        path = f"model.layers.0.block_sparse_moe.experts.{expert}"
        found[f"{path}.w1.weight"] = array(random, INTER, HIDDEN)
        found[f"{path}.w2.weight"] = array(random, HIDDEN, INTER)
    found["model.layers.0.block_sparse_moe.gate.weight"] = array(random, EXPERTS, HIDDEN)
    return found


MODELS = {"qwen3_moe": qwen3_moe, "mixtral": mixtral}


def group(name: str) -> str:
    """Return the layer of a tensor."""
    for word in (".mlp.experts.", ".mlp.shared_experts."):
        if word in name:
            return name.partition(word)[0] + word[:-1]
    return name.partition(".mlp.switch_mlp.")[0] + ".mlp.experts" if "switch_mlp" in name else name


def kind(name: str, scheme: str) -> str | None:
    """None, one kind for all matrices but the routers, or another one for some."""
    if not scheme or ("proj" not in name and ".w" not in name.removesuffix(".weight")):
        return None
    return "int8" if scheme == "mixed" and ("down_proj" in name or ".w2." in name) else "int4"


def pack(store: FolderStore, arrays: Arrays, component: str, scheme: str) -> AImage:
    """Write groups as packed blobs, each with metadata of its own, or for each of its tensors."""
    prefix = f"{component}/" if component else ""
    groups: dict[str, Arrays] = {}
    for name, values in arrays.items():
        groups.setdefault(group(name), {})[name] = values
    layers = [Layer(store.add(mediatype.AIMAGE_FILE, b"{}"), f"{prefix}config.json")]
    for layer_name, members in groups.items():
        parts: dict[str, Part] = {}
        metadata: dict[str, str] = {}
        for name, values in members.items():
            own = kind(name, scheme)
            if own is None:
                parts[name] = bits(mx.array(values).astype(mx.bfloat16))
                continue
            parts |= {name + key: bits(part) for key, part in quantize(values, own).items()}
            said = Quantization.parse(own).metadata
            each = {f"{name}.{key}": value for key, value in said.items()}
            metadata |= each if scheme == "mixed" else said
        data = store.add(mediatype.AIMAGE_SAFETENSORS, blob(parts, metadata))
        layers.append(Layer(data, prefix + layer_name))
    return AImage(json.dumps({}).encode(), tuple(layers))


@pytest.mark.parametrize(
    ("model", "scheme", "component"),
    [
        ("qwen3_moe", "", "text_encoder"),
        ("qwen3_moe", "int4", ""),
        ("qwen3_moe", "mixed", "text_encoder"),
        ("mixtral", "mixed", ""),
    ],
)
def test_every_tensor_comes_back(tmp_path: Path, model: str, scheme: str, component: str) -> None:
    arrays, store = MODELS[model](), FolderStore(tmp_path)
    weights = ModelWeights.open(store, pack(store, arrays, component, scheme), component)
    assert set(weights.keys()) == set(arrays)
    loaded = ModelWeights.open(store, pack(store, arrays, component, scheme), component)
    loaded.load(mx.float32)
    for name, values in arrays.items():
        own = kind(name, scheme)
        expected = values if own is None else judge(values, own)
        assert weights.get_quantization(name) == (Quantization.parse(own) if own else None)
        np.testing.assert_array_equal(weights.read_numpy(name), expected)
        np.testing.assert_array_equal(np.array(loaded[name]), expected)


def test_one_layer_a_group(tmp_path: Path) -> None:
    aimage = pack(FolderStore(tmp_path), qwen3_moe(), "", "mixed")
    names = [layer.name for layer in aimage.layers]
    assert names.count("model.layers.1.mlp.experts") == 1
    assert "model.layers.2.mlp.experts" in names
    assert not any(".experts." in name for name in names)


def test_one_expert_opens_one_blob(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    aimage = pack(store, qwen3_moe(), "", "int4")
    for layer in aimage.layers:
        if layer.name not in ("config.json", "model.layers.1.mlp.experts"):
            store.find_path(layer.descriptor).unlink(missing_ok=True)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    found = ModelWeights.open(store, aimage, "").read_numpy(name)
    np.testing.assert_array_equal(found, judge(qwen3_moe()[name], "int4"))

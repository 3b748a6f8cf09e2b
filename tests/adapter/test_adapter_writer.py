"""Adapters in the names of other tools: the same changes, or a refusal with the reason."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.adapter.writer import DIALECTS, ConvertedAdapter, convert_adapter
from clowder_aimage.errors import FormatError, UsageError
from tests.adapter.test_adapter_reader import SHAPES, VECTORS, weight_of
from tests.adapter.vectors import (
    ALPHA,
    RANK,
    TINY,
    AdapterVector,
    pair_of,
    random,
    safetensors,
)

# the vectors that a dialect has no names for, by the reason
PEFT_LACKS = {
    "does not have whole differences": {"diff-fused"},
    "does not have (changes of biases|whole differences)": {"diff", "norms", "distill-patch"},
    "does not have whole weights": {"set-weight", "modules-to-save"},
    "does not have LoKr": {
        *("lokr", "lokr-decomposed", "lokr-first-decomposed", "lokr-peft"),
        *("lokr-fused", "lokr-decomposed-fused", "lokr-first-decomposed-fused"),
    },
    "does not have DoRA of kohya-ss": {"dora-rows", "dora-columns", "dora-rows-fused", "dora-lokr"},
}
TEXT = {name for name in VECTORS if name.startswith("text-")}
KOHYA_LACKS = {
    "does not have DoRA of peft": {"dora-peft", "dora-peft-named", "dora-peft-fused"},
    "does not have whole biases": {"modules-to-save"},
    "does not have biases of layers": {"lora-bias-without-bias"},
}
LACKS = {
    "comfyui": KOHYA_LACKS,
    "kohya": KOHYA_LACKS,
    "peft": PEFT_LACKS,
    "diffusers": PEFT_LACKS
    | {"adapters of the component text_encoder": TEXT, "not have LoHa": {"loha", "loha-fused"}},
}


def write(converted: ConvertedAdapter, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "adapter_model.safetensors"
    path.write_bytes(b"".join(converted.encode()))
    if converted.config is not None:
        (directory / "adapter_config.json").write_text(json.dumps(converted.config))
    return path


@pytest.mark.parametrize("vector", VECTORS.values(), ids=str)
def test_a_converted_adapter_has_the_same_changes(vector: AdapterVector, tmp_path: Path) -> None:
    path = vector.write(tmp_path / "in")
    weights = {tensor: weight_of(tensor) for tensor in vector.effects}
    expected = vector.changed(weights, 0.7)
    for dialect, shapes in itertools.product(DIALECTS, (SHAPES, None)):  # of the base, if known
        said = next((text for text, names in LACKS[dialect].items() if vector.name in names), None)
        if said is not None:
            with pytest.raises(UsageError, match=said):
                convert_adapter(path, dialect, label="style", shapes=shapes)
            continue
        converted = convert_adapter(path, dialect, label="style", shapes=shapes)
        written = write(converted, tmp_path / f"{dialect}{shapes is None}")
        adapter = read_adapter(written, SHAPES, label="style", base="tiny")
        for tensor in adapter.changes.keys() - vector.effects.keys():  # stacked with a changed one
            assert tensor.partition(".to_")[0] + ".to_q.weight" in vector.effects
            (change,) = adapter.changes[tensor]
            assert not dense.compute_effect(weight_of(tensor), change, 1).any()
        for tensor, values in expected.items():
            uses = [(change, 0.7) for change in adapter.changes[tensor]]
            found = dense.apply_changes(weights[tensor], uses)
            where = f"{dialect} {tensor}"
            np.testing.assert_allclose(found, values, rtol=2e-5, atol=2e-6, err_msg=where)


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("diffusers", "transformer.layers.0.attention.to_q.lora_A.weight"),
        ("peft", "base_model.model.layers.0.attention.to_q.lora_A.weight"),
        ("comfyui", "diffusion_model.layers.0.attention.qkv.lora_down.weight"),
        ("comfyui", "diffusion_model.layers.0.attention.out.alpha"),
        ("comfyui", "diffusion_model.final_layer.linear.lora_up.weight"),
        ("kohya", "lora_unet_layers_0_attention_qkv.lora_up.weight"),
        ("kohya", "lora_unet_x_embedder.alpha"),
    ],
)
def test_a_dialect_has_its_names(dialect: str, name: str, tmp_path: Path) -> None:
    path = VECTORS["ai-toolkit-alpha"].write(tmp_path)
    assert name in convert_adapter(path, dialect, label="style").tensors


def test_stacked_pairs_are_a_of_all_layers_and_b_in_blocks(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {}
    for number, letter in enumerate("qkv"):
        down, up = random(RANK, 48, seed=number), random(48, RANK, seed=number + 9)
        stem = f"transformer.layers.0.attention.to_{letter}"
        tensors |= pair_of(stem, down.astype(np.float16), up, "AB", True)
    halves = {name: array.astype("f2") for name, array in tensors.items() if "lora" in name}
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(tensors | halves, {"trigger_word": "x", "sshs_model_hash": "1"}))
    stacked = convert_adapter(path, "comfyui", label="style")
    assert stacked.metadata == {"trigger_word": "x", "format": "pt"}
    first, second, alpha = stacked.tensors.values()
    assert (first.dtype, first.codes.shape, second.codes.shape) == ("F16", (12, 48), (144, 12))
    assert alpha.codes == 3 * ALPHA
    assert not second.codes[:48, 4:].any()
    again = convert_adapter(write(stacked, tmp_path), "diffusers", label="style")
    assert again.tensors.keys() == halves.keys()
    for name, array in again.tensors.items():  # bit for bit
        assert (array.codes == halves[name]).all()
    stated = json.loads(again.metadata["lora_adapter_metadata"])
    assert (stated["transformer.r"], stated["transformer.lora_alpha"]) == (RANK, ALPHA)


def test_a_pair_of_stacked_layers_returns_bit_for_bit(tmp_path: Path) -> None:
    path = VECTORS["comfyui-down"].write(tmp_path / "in")
    split = write(convert_adapter(path, "diffusers", label="style"), tmp_path / "split")
    again = convert_adapter(split, "comfyui", label="style").tensors
    assert again.keys() == VECTORS["comfyui-down"].tensors.keys()
    for name, array in VECTORS["comfyui-down"].tensors.items():
        assert again[name].codes.tobytes() == array.tobytes()


def test_ranks_and_alphas_of_each_layer_are_patterns(tmp_path: Path) -> None:
    tensors = {
        **pair_of("lora_unet_layers_0_attention_to_q", random(4, 48), random(48, 4), "down", True),
        **pair_of(
            "lora_unet_layers_0_feed_forward_w2", random(2, 128), random(48, 2), "down", True
        ),
        **pair_of(
            "lora_unet_layers_1_feed_forward_w2", random(2, 128), random(48, 2), "down", False
        ),
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(tensors))
    config = convert_adapter(path, "peft", label="style").config
    assert config is not None
    assert (config["r"], config["lora_alpha"]) == (2, 6)
    assert config["rank_pattern"] == {"layers.0.attention.to_q": 4}
    assert config["alpha_pattern"] == {"layers.1.feed_forward.w2": 2}
    assert len(config["target_modules"]) == 3


@pytest.mark.parametrize(
    ("tensors", "dialect", "said"),
    [
        ({}, "webui", "unknown dialect of adapters: 'webui'"),
        (
            pair_of(
                "transformer.layers.0.attention.to_q", random(4, 48), random(48, 4), "AB", False
            )
            | {
                f"transformer.layers.0.attention.to_q.hada_{name}_{half}": random(48, 48)
                for name in ("w1", "w2")
                for half in "ab"
            },
            "comfyui",
            "lora and loha for one layer",
        ),
        (
            pair_of(
                "transformer.layers.0.attention.to_q", random(4, 48), random(48, 4), "AB", False
            )
            | pair_of("lora_te_layers_0_mlp_up_proj", random(4, 32), random(64, 4), "AB", False),
            "peft",
            "adapters of two components",
        ),
        (
            pair_of(
                "transformer.layers.0.attention.to_q", random(4, 48), random(48, 4), "AB", False
            )
            | pair_of(
                "transformer.layers.0.attention.to_k", random(4, 48), random(48, 4), "AB", False
            )
            | {"transformer.layers.0.attention.to_k.lora_magnitude_vector": random(48)},
            "diffusers",
            "DoRA of some layers only",
        ),
    ],
)
def test_other_adapters_are_refused(tensors: Any, dialect: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(tensors))
    with pytest.raises(UsageError, match=said):
        convert_adapter(path, dialect, label="style")


def test_an_adapter_for_another_family_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(pair_of("unet.down.0", random(4, 8), random(8, 4), "AB", False)))
    with pytest.raises(FormatError, match="does not match Z-Image, which has no layer for unet"):
        convert_adapter(path, "peft", label="style")


LIVE = ("kohya", "comfyui", "musubi", "dora-peft-fused", "lora-bias", "peft-rslora", "peft-pattern")


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("dialect", ["diffusers", "peft"])
def test_diffusers_and_peft_read_converted_adapters(
    dialect: str, name: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    diffusers, peft = pytest.importorskip("diffusers"), pytest.importorskip("peft")
    vector, out = VECTORS[name], tmp_path / "out"
    path = write(convert_adapter(vector.write(tmp_path), dialect, label="style"), out)
    network = diffusers.ZImageTransformer2DModel.from_pretrained(
        TINY / "transformer", torch_dtype=torch.float32
    )
    weights = {key: one.clone().numpy() for key, one in network.state_dict().items()}
    if dialect == "diffusers":
        state, metadata = diffusers.ZImagePipeline.lora_state_dict(
            str(path), return_lora_metadata=True
        )
        network.load_lora_adapter(state, metadata=metadata, prefix="transformer")
        network.fuse_lora()
        network.unload_lora()
    else:
        network = peft.PeftModel.from_pretrained(network, str(out)).merge_and_unload()
    fused = network.state_dict()
    changed = vector.changed({f"transformer/{key}": one for key, one in weights.items()})
    for tensor, expected in changed.items():
        found = fused[tensor.partition("/")[2]].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=tensor)

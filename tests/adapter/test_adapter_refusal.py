"""Adapters that are damaged, incomplete or for another base are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.adapter.writer import convert_adapter
from clowder_aimage.errors import FormatError, UsageError
from tests.adapter.vectors import pair_of, random, safetensors, tiny_shapes

SHAPES = tiny_shapes()
STEM = "transformer.layers.0.attention.to_q"
QKV = "diffusion_model.layers.0.attention.qkv"
DOWN, UP = random(4, 48), random(48, 4)
PAIR = pair_of(STEM, DOWN, UP, "AB", False)
A, B = PAIR
Change = Callable[..., None]


def read_file(path: Path, tensors: Any, config: Any = None, **metadata: str) -> Any:
    file = path / "style.safetensors"
    file.write_bytes(safetensors(tensors, metadata))
    return read_adapter(file, SHAPES, label="style", base="tiny", config=config)


def with_nan() -> np.ndarray:
    values = DOWN.copy()
    values[1, 2] = np.nan
    return values


LAYER = {f"{STEM}.hada_{name}": random(48, 4) for name in ("w1_a", "w2_a")} | {
    f"{STEM}.hada_{name}": random(4, 48) for name in ("w1_b", "w2_b")
}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "contains no tensors"),
        (PAIR | {"x.weight": DOWN}, "x.weight is not a tensor of an adapter"),
        ({A: DOWN}, "up is missing"),
        ({B: UP}, "down is missing"),
        ({A: DOWN[:0], B: UP[:, :0]}, "rank 0"),
        ({A: DOWN[:3], B: UP}, "incompatible shapes"),
        ({A: DOWN[0], B: UP}, "incompatible shapes"),
        (PAIR | {A: with_nan()}, r"lora_A.weight has values that are not finite \(NaN"),
        (PAIR | {B: np.full((48, 4), np.inf, np.float16)}, "not finite"),
        (PAIR | {B: np.full((48, 4), 1e300)}, "not finite"),
        (PAIR | {f"{STEM}.alpha": np.float32("inf")}, "alpha is not finite"),
        (PAIR | {f"{STEM}.alpha": np.float32(1e38)}, "alpha: .* is too large"),
        (PAIR | {f"{STEM}.diff_b": UP}, r"diff_b: its shape is \[48, 4\]"),
        (PAIR | {f"{STEM}.diff": np.float32(1)}, r"diff: its shape is \[\]"),
        (PAIR | {f"{STEM}.alpha": np.ones(2, np.float32)}, "alpha is not a number"),
        ({f"{STEM}.alpha": np.float32(1)}, "alpha: it belongs to matrices that are missing"),
        ({f"{STEM}.lora_B.bias": UP[:, 0]}, "bias of matrices that are missing"),
        (PAIR | {f"{STEM}.lora_down.weight": DOWN}, "two tensors for one purpose"),
        (PAIR | {f"diffusion_{A}".replace("transformer", "model"): DOWN}, "is missing"),
        (
            PAIR | pair_of(QKV, DOWN, random(144, 4), "AB", True),
            "names one layer of tiny twice",
        ),
        (PAIR | {"alpha": np.float32(1)}, "alpha names no layer"),
        ({A: DOWN, B: UP.astype(np.int64)}, "has the type I64"),
        ({f"{STEM}.oft_blocks": DOWN}, "OFT or BOFT"),
        ({f"{STEM}.dora_scale": UP[:, :1]}, "DoRA has no matrices beside it"),
        (PAIR | {f"{STEM}.dora_scale": UP[:7, :1]}, r"dora_scale it has \[7, 1\]"),
        (PAIR | {f"{STEM}.lora_magnitude_vector": DOWN[:1]}, r"it has \[1, 48\]"),
        (
            PAIR | {f"{STEM}.dora_scale": UP[:, 0], f"{STEM}.lora_magnitude_vector": UP[:, 0]},
            "occurs twice",
        ),
        (PAIR | LAYER | {f"{STEM}.dora_scale": UP[:, 0]}, "lora and loha beside it"),
        (
            pair_of(QKV, DOWN, random(144, 4), "AB", True) | {f"{QKV}.dora_scale": DOWN[:1]},
            "norms over all three",
        ),
        (PAIR | {f"{STEM}.use_dora_flag": np.ones(1, np.uint8)}, "magnitude of DoRA is missing"),
        (PAIR | {"use_dora_flag": np.ones(1, np.uint8)}, "says that it is a DoRA"),
        (PAIR | {f"{STEM}.diff_b": UP[:7, 0]}, r"diff_b it has \[7\]"),
        (PAIR | {f"{STEM}.diff": UP}, r"diff it has \[48, 4\]"),
        (PAIR | {f"{STEM}.reshape_weight": np.array([64, 48])}, r"reshape_weight it has \[64, 48"),
        ({f"{STEM}.reshape_weight": np.array([48, 48])}, "matrices that are missing"),
        (PAIR | {f"{STEM}.reshape_weight": np.full(1, np.nan)}, "not a list of dimensions"),
        (
            {k: v for k, v in LAYER.items() if not k.endswith("w2_a")},
            "not all matrices is there: hada_w2_a is missing",
        ),
        ({f"{STEM}.lokr_w1": random(4, 4)}, "lokr_w2 is missing"),
        (
            {f"{STEM}.lokr_w1": random(4, 4), f"{STEM}.lokr_w2_a": random(12, 2)},
            "lokr_w2_b is missing",
        ),
        (
            {f"{STEM}.lokr_w1": random(4, 4), f"{STEM}.lokr_w1_a": random(4, 4)},
            "lokr_w1_b is missing",
        ),
        (
            {f"{STEM}.lokr_w1": random(4), f"{STEM}.lokr_w2": random(12, 12)},
            r"its shape is \[4\], not a matrix",
        ),
        (
            {"transformer.x_pad_token.lora_A": DOWN, "transformer.x_pad_token.lora_B": UP[:1]},
            "not a linear layer",
        ),
        (
            {
                f"transformer.layers.0.attention.norm_q.lora_{h}.weight": v
                for h, v in (("A", DOWN), ("B", UP))
            },
            r"the model \[24\]",
        ),
    ],
)
def test_a_file_is_refused(tensors: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=said) as caught:
        read_file(tmp_path, tensors)
    assert "style" in caught.value.message
    assert caught.value.hint or "alpha" in said or "DoRA" in said


def test_a_product_larger_than_its_layer_is_refused_before_it_is_made(tmp_path: Path) -> None:
    big = np.zeros((30_000, 1), np.float16)
    for tensors in (
        {f"{STEM}.lokr_w1": big, f"{STEM}.lokr_w2": big.T},
        {f"{STEM}.lora_A": big.T, f"{STEM}.lora_B": big},
        {f"{STEM}.hada_{n}_{h}": big if h == "a" else big.T for n in ("w1", "w2") for h in "ab"},
    ):
        with pytest.raises(FormatError, match=r"\[30000, 30000\], the model \[48, 48\]"):
            read_file(tmp_path, tensors)


def test_an_adapter_for_another_base_says_what_it_is_for(tmp_path: Path) -> None:
    names = {"ss_base_model_version": "flux1", "modelspec.architecture": "flux-1/lora"}
    said = (
        "style does not match tiny, which has no layer for .*; it says that it is for flux1, flux"
    )
    with pytest.raises(FormatError, match=said):
        read_file(
            tmp_path, pair_of("lora_unet_double_blocks_0_img_attn", DOWN, UP, "AB", True), **names
        )
    said = r"lora_B.weight it has \[96, 48\], the model \[48, 48\] \(transformer/.*for org/other"
    with pytest.raises(FormatError, match=said):
        other = {"base_model_name_or_path": "org/other"}
        read_file(tmp_path, pair_of(STEM, DOWN, random(96, 4), "AB", False), other)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "unsupported adapter type 'IA3'"),
        ({"lora_alpha": "8"}, "alpha of .* is not a number: '8'"),
        ({"r": True}, "r of .* is not a number"),
        ({"r": -4, "use_rslora": True}, "r of .* is not a rank: -4"),
        ({"use_rslora": 1}, "use_rslora of .* is neither true nor false: 1"),
        ({"use_dora": "true"}, "use_dora of .* is neither true nor false: 'true'"),
        ({"r": 4, "rank_pattern": {"to_q": 0.5}, "lora_alpha": 1}, "rank_pattern is not a rank"),
        ({"alpha_pattern": []}, "alpha_pattern of .* is not an object"),
        ({"alpha_pattern": {"(a+)+": 1}}, "regular expression, which is not read"),
        ({"alpha_pattern": {"to_q": None}}, "not a number"),
        ({"modules_to_save": "x"}, "not a list of names"),
        ({"use_dora": True}, "says that it is a DoRA"),
        ({"layer_replication": [[0, 1]]}, "layer_replication, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"init_lora_weights": "Lora_GA"}, "type lora_ga changes the base"),
        ({"init_lora_weights": "spectral"}, "the initialization spectral is unknown"),
        ({"init_weights": "spectral"}, "the initialization spectral is unknown"),
        ({"init_lora_weights": 3}, "the initialization 3 is unknown"),
        ({"alora_invocation_tokens": [5]}, "sets alora_invocation_tokens, which"),
        ({"use_bdlora": {"target_modules_bd_a": ["x"]}}, "sets use_bdlora, which is not"),
        ({"kasa_config": {"beta": 1}}, "sets kasa_config, which is not supported"),
        ({"use_novelty": True}, "sets use_novelty, which is not supported"),
        ({"r": 8, "lora_alpha": 8}, "its rank is 4, but the configuration has 8"),
    ],
)
def test_a_configuration_is_refused(config: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=said):
        read_file(tmp_path, PAIR, config)


@pytest.mark.parametrize("text", ["{", "[]", '{"transformer.r": "x"}'])
def test_metadata_of_diffusers_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="lora_adapter_metadata of style"):
        read_file(tmp_path, PAIR, lora_adapter_metadata=text)


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.pt", b"\x80\x04x", "is pickled"),
        ("a.ckpt", b"", "is pickled"),
        ("a.safetensors", b"PK\x03\x04", "is pickled"),
        ("a.safetensors", b"GGUF\x03", "is a GGUF file"),
        ("a.safetensors", b"\x10\0\0", "style is damaged: truncated"),
        ("a.safetensors", safetensors(PAIR)[:-1], "style is damaged: the tensors have"),
    ],
)
def test_other_files_are_refused(name: str, raw: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=said):
        read_adapter(path, SHAPES, label="style", base="tiny")


def test_a_file_larger_than_its_base_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("clowder_aimage.adapter.file._MIN_LIMIT", 100)
    shapes = {"transformer/layers.0.attention.to_q.weight": (8, 8)}
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(pair_of(STEM, random(99, 8), random(8, 99), "AB", False)))
    with pytest.raises(FormatError, match="1584 values, more than 128: too many"):
        read_adapter(path, shapes, label="style", base="tiny")


def test_a_directory_of_peft_is_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(PAIR))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 2}))
    adapter = read_adapter(tmp_path, SHAPES, label="style", base="tiny")
    (change,) = adapter.changes["transformer/layers.0.attention.to_q.weight"]
    assert getattr(change, "scale", None) == 0.5
    (tmp_path / "other.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="must contain one safetensors file"):
        read_adapter(tmp_path, SHAPES, label="style", base="tiny")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(FormatError, match="is not a JSON object"):
        read_adapter(tmp_path / "adapter_model.safetensors", SHAPES, label="style", base="tiny")


def test_embeddings_beside_an_adapter_are_a_warning(tmp_path: Path) -> None:
    embeddings = {f"bundle_emb.{word}.clip_l": random(2, 8) for word in ("my.style", "ohwx")}
    adapter = read_file(tmp_path, PAIR | embeddings)
    assert adapter.changes.keys() == read_file(tmp_path, PAIR).changes.keys()
    assert adapter.warning == (
        "style has embeddings of its own for my.style, ohwx, which are not used"
    )
    assert read_file(tmp_path, PAIR).warning is None
    with pytest.raises(FormatError, match=r"no tensors of an adapter, but the embeddings my\.sty"):
        read_file(tmp_path, embeddings)


@pytest.mark.parametrize(
    "stem",
    [
        "_orig_mod.layers.0.attention.to_q",
        "module._orig_mod.layers.0.attention.to_q",
        "base_model.model._forward_module.layers.0._orig_mod.attention.to_q",
        "lora_unet__orig_mod_layers_0_attention_to_q",
    ],
)
def test_names_of_wrapped_networks_are_those_of_their_layers(stem: str, tmp_path: Path) -> None:
    tensors = pair_of(stem, DOWN, UP, "AB", False)
    assert read_file(tmp_path, tensors).changes.keys() == read_file(tmp_path, PAIR).changes.keys()


def test_embeddings_are_not_lost_in_another_dialect(tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    file.write_bytes(safetensors(PAIR | {"bundle_emb.ohwx.clip_l": random(2, 8)}))
    with pytest.raises(UsageError, match=r"cannot be written as kohya, .* embeddings of words"):
        convert_adapter(file, "kohya", label="style")

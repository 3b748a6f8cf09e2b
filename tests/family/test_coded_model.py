"""Quantized files of image models are packed as models of the dequantized weights."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.cli.create.result import encode_result
from clowder_aimage.cli.create.result import format_result as text_of
from clowder_aimage.errors import FormatError
from clowder_aimage.formats.gguf_header import TENSORS
from clowder_aimage.importer import PackedModel, Recipe
from clowder_aimage.oci import Reference
from tests.family.conftest import FamilyStore
from tests.family.foreign_layout import component, original_transformer
from tests.importer.coded_file import FP4, Array, Entry, float8, number, save, swizzled, text
from tests.importer.formats_gguf import STRING, info_of, padded, pair_of
from tests.process import Aimage

RANDOM = np.random.default_rng(3)
FLOAT8 = np.array([float8(code) for code in range(256)])
FINITE = np.flatnonzero(np.arange(256) & 127 != 127).astype(np.uint8)


def layers_of(made: PackedModel) -> dict[str, str]:
    return {one.name: str(one.descriptor.digest) for one in made.aimage.layers if one.is_tensor}


def single(array: Any) -> Entry:
    return "F32", np.asarray(array, np.float64).astype("<f4")


def coded() -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return ComfyUI's transformer with layers in all formats, and the dequantized one."""
    own: dict[str, Entry] = {
        name: ("BF16", value) for name, value in original_transformer().items()
    }
    plain = dict(own)

    def put(stem: str, kind: str, codes: Entry, value: Entry, **scales: Entry) -> None:
        own[f"{stem}.weight"], plain[f"{stem}.weight"] = codes, value
        own[f"{stem}.comfy_quant"] = text({"format": kind})
        own.update((f"{stem}.{word}", scale) for word, scale in scales.items())

    codes = RANDOM.choice(FINITE, (144, 48))
    scale = np.float32(0.01)
    value = single(FLOAT8[codes] * float(scale))
    stem = "layers.0.attention.qkv"
    put(stem, "float8_e4m3fn", ("F8_E4M3", codes), value, weight_scale=number(float(scale)))
    integers, rows = RANDOM.integers(-128, 128, (128, 48), np.int8), RANDOM.random((128, 1))
    factors = rows.astype("<f4")
    value = single(integers * factors.astype(np.float64))
    stem = "layers.0.feed_forward.w1"
    put(stem, "int8_tensorwise", ("I8", integers), value, weight_scale=("F32", factors))
    codes, scales = RANDOM.choice(FINITE, (48, 128)), RANDOM.integers(110, 130, (48, 4), np.uint8)
    values = FLOAT8[codes] * np.repeat(2.0 ** (scales - 127.0), 32, axis=1)
    halves = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    stem = "layers.0.feed_forward.w2"
    blocks = ("F8_E8M0", swizzled(scales))
    put(stem, "mxfp8", ("F8_E4M3", codes), ("BF16", halves), weight_scale=blocks)
    codes, scales = RANDOM.integers(0, 16, (128, 48), np.uint8), RANDOM.choice(FINITE, (128, 3))
    levels = np.array([*FP4, *(-float(level) for level in FP4)])
    steps = (FLOAT8[scales] * float(scale)).astype(np.float32).astype(np.float64)
    value = single(levels[codes] * np.repeat(steps, 16, axis=1))
    pairs = ("U8", codes[:, ::2] << 4 | codes[:, 1::2])
    blocks, second = ("F8_E4M3", swizzled(scales)), number(float(scale))
    stem = "layers.0.feed_forward.w3"
    put(stem, "nvfp4", pairs, value, weight_scale=blocks, weight_scale_2=second)
    return own, plain


def test_a_quantized_file_of_comfyui_gives_the_blobs_of_the_dequantized_weights(
    family: FamilyStore, tmp_path: Path
) -> None:
    own, plain = coded()
    made = family.create("own", save(tmp_path / "own.safetensors", own))
    wanted = family.create("plain", save(tmp_path / "plain.safetensors", plain))
    assert layers_of(made) == layers_of(wanted)
    formats = {"float8_e4m3fn": 3, "int8_tensorwise": 1, "mxfp8": 1, "nvfp4": 1}
    assert made.aimage.properties["components"]["transformer"]["decoded"] == formats
    assert made.report.decoded["float8_e4m3fn", "F32"] == 3  # query, key and value
    value = encode_result(Reference.parse("own"), made)
    assert {"from": "nvfp4", "to": "F32", "tensors": 1} in value["decoded"]
    said = text_of(value, made, Recipe())
    assert "1 tensor decoded from mxfp8 to BF16, without loss\n" in said
    assert "--dtype bf16 would round" in said
    assert "--dtype" not in text_of(value, made, Recipe.parse(dtype="bf16"))
    assert "decoded" not in wanted.aimage.properties["components"]["transformer"]


def gguf_of(tensors: Mapping[str, Any], quantized: Mapping[str, Array], prefix: str = "") -> bytes:
    """Return a file as stable-diffusion.cpp writes it: BF16 and Q8_0, dimensions of 1 left out."""
    numbers = {name: number for number, (name, _, _) in TENSORS.items()}
    infos, data = b"", b""
    for name, value in tensors.items():
        kind, own = ("Q8_0", quantized[name]) if name in quantized else ("BF16", value)
        shape = tuple(size for size in reversed(value.shape) if size > 1)
        infos += info_of((prefix + name, numbers[kind], shape), len(data))
        data = padded(data + own.tobytes(), 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1)
    return padded(head + pair_of(("general.architecture", STRING, "lumina2")) + infos, 32) + data


def test_a_gguf_file_gives_the_blobs_of_the_dequantized_weights(
    family: FamilyStore, tmp_path: Path
) -> None:
    tensors = original_transformer()
    name = "layers.1.feed_forward.w2.weight"
    scales = RANDOM.standard_normal((48, 4)).astype("<f2")
    codes = RANDOM.integers(-128, 128, (48, 4, 32), np.int8)
    blocks = np.concatenate([scales[..., None].view(np.uint8), codes.view(np.uint8)], axis=2)
    plain: dict[str, Entry] = {key: ("BF16", value) for key, value in tensors.items()}
    plain[name] = single((scales[..., None].astype(float) * codes).reshape(48, 128))
    path = tmp_path / "own.gguf"
    path.write_bytes(gguf_of(tensors, {name: blocks}, "model.diffusion_model."))
    made = family.create("own", path)
    wanted = family.create("plain", save(tmp_path / "plain.safetensors", plain))
    assert layers_of(made) == layers_of(wanted)
    assert made.aimage.properties["components"]["transformer"]["decoded"] == {"Q8_0": 1}
    # without a model to complete it, the file is one layer
    done = Aimage(tmp_path, tmp_path / "store")("create", "whole", path)
    assert "whole:latest: gguf in 1 file" in done.err and "--like REF adds" in done.err


LLAMA = {
    "layers.": "blk.",
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def test_a_text_encoder_of_llama_cpp_has_the_same_blobs(
    family: FamilyStore, tmp_path: Path
) -> None:
    tensors = {}
    for own, value in component("text_encoder").items():
        name = own.replace("norm.weight", "output_norm.weight") if own == "norm.weight" else own
        for old, new in LLAMA.items():
            name = name.replace(old, new)
        tensors[name] = value
    (tmp_path / "qwen.gguf").write_bytes(gguf_of(tensors, {}))
    (tmp_path / "z.gguf").write_bytes(gguf_of(original_transformer(), {}))
    made = family.create("own", tmp_path)
    assert layers_of(made) == layers_of(family.tiny)


def cut(own: dict[str, Entry]) -> None:
    codes = own["layers.0.feed_forward.w2.weight"][1]
    own["layers.0.feed_forward.w2.weight"] = ("F8_E4M3", codes[:, :96])


def unscaled(own: dict[str, Entry]) -> None:
    del own["layers.0.feed_forward.w3.weight_scale_2"]


def padded_rows(own: dict[str, Entry]) -> None:
    stem = "layers.0.attention.qkv"
    own[f"{stem}.weight"] = ("F8_E4M3", np.zeros((160, 48), np.uint8))


@pytest.mark.parametrize("change", [cut, unscaled, padded_rows])
def test_a_damaged_file_leaves_nothing(change: Any, family: FamilyStore, tmp_path: Path) -> None:
    own, _ = coded()
    change(own)
    before = sorted(family.store.root.rglob("*"))
    with pytest.raises(FormatError):
        family.create("own", save(tmp_path / "own.safetensors", own))
    assert sorted(family.store.root.rglob("*")) == before

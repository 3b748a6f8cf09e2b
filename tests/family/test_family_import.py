"""Models in the layouts of ComfyUI, MLX and mflux become the AImage of the diffusers directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.errors import AImageError, FormatError, UsageError
from clowder_aimage.family.image_family import Z_IMAGE
from clowder_aimage.oci import Reference
from clowder_aimage.tensor import compute_nbytes, encode_header
from tests.family import foreign_layout
from tests.family.conftest import FamilyStore, digests
from tests.store import read

Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize("layout", foreign_layout.LAYOUTS)
def test_every_layout_gives_the_same_tensors(family: FamilyStore, layout: str) -> None:
    made = family.create(layout, family.path(layout))
    own, found = digests(family.tiny), digests(made)
    assert {name: found.get(name) for name in own} == own
    others = {name.partition("/")[0] for name in found.keys() - own.keys()}
    assert others <= {"source", "extra"}
    # at most the headers of the files and the extras are new
    assert sum(not one.existed for one in made.layers) <= len(found) - len(own)
    kept = {
        "comfyui-all-in-one": ["extra/transformer.norm_final.weight"],
        "mflux": ["extra/text_encoder.rotary_emb.inv_freq"],
    }
    assert sorted(name for name in found if name.startswith("extra/")) == kept.get(layout, [])
    assert made.aimage.properties["components"].keys() == (
        family.tiny.aimage.properties["components"].keys()
    )


def test_a_lone_transformer_is_completed(family: FamilyStore) -> None:
    path = family.path("comfyui") / "diffusion_models" / "z.safetensors"
    found = digests(family.create("lone", path))
    assert found.items() > digests(family.tiny).items()
    with pytest.raises(UsageError, match="lacks text_encoder, vae, tokenizer") as error:
        family.create("alone", path, like=None)
    assert f"aimage create NAME {path} --like REF" in str(format_advice(error.value))
    with pytest.raises(UsageError, match="lacks tokenizer") as error:
        family.create("alone", family.path("comfyui"), like=None)
    assert f"into {family.path('comfyui')}/tokenizer, or take them" in str(
        format_advice(error.value)
    )


def sized(root: Path, **sizes: int) -> Path:
    """Write a split model whose configs follow from its shapes, without values."""
    configs: dict[str, dict[str, Any]] = {
        "transformer": {
            "dim": 128,
            "n_heads": 1,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "cap_feat_dim": 32,
            "in_channels": 16,
        },
        "text_encoder": {
            "hidden_size": 32,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "vocab_size": 267,
        },
        "vae": {
            "block_out_channels": [32] * 4,
            "layers_per_block": 1,
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 16,
        },
    }
    for name, config in configs.items():
        config |= {key: size for key, size in sizes.items() if key in config}
        shapes = Z_IMAGE.get_component(name).shapes(config)
        tensors = [(key, "BF16", shape) for key, shape in shapes.items()]
        size = sum(compute_nbytes("BF16", shape) for shape in shapes.values())
        (root / f"{name}.safetensors").write_bytes(encode_header(tensors) + bytes(size))
    shutil.copytree(foreign_layout.TINY / "tokenizer", root / "tokenizer")
    return root


def test_configs_and_scheduler_are_those_of_the_family(family: FamilyStore, tmp_path: Path) -> None:
    made = family.create("sized", sized(tmp_path), like=None)

    def config(name: str) -> Any:
        return json.loads(read(family.store, made.aimage.get_layer(name).descriptor))

    assert config("transformer/config.json")["axes_dims"] == [32, 48, 48]
    assert config("vae/config.json")["scaling_factor"] == 0.3611
    assert config("scheduler/scheduler_config.json")["shift"] == 3.0
    assert config("model_index.json")["_class_name"] == "ZImagePipeline"
    assert made.aimage.properties["family"] == "z-image"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 96}, "heads have 96 channels"),
        ({"vocab_size": 266}, "the tokenizer has 267 tokens, and the text encoder 266"),
        ({"hidden_size": 64}, "the transformer and the text_encoder belong to different models"),
        ({"latent_channels": 4}, "the transformer and the vae belong to different models"),
    ],
)
def test_components_that_do_not_fit_are_refused(
    family: FamilyStore, tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(AImageError, match=message) as error:
        family.create("unfit", sized(tmp_path, **sizes), like=None)
    assert error.value.exit_code == (2 if "dim" in sizes else 5)


def without(*names: str) -> Change:
    def change(tensors: dict[str, Any]) -> None:
        for name in names:
            del tensors[name]

    return change


def adding(*names: str) -> Change:
    return lambda tensors: tensors.update({name: np.zeros((2, 2), np.uint16) for name in names})


QKV = "layers.1.attention.qkv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.0.ffn_norm1.weight", QKV), r"lacks 4 tensors \(layers.0.ffn_norm1"),
        (adding("double_blocks.0.img_mod.lin.weight"), r"1 tensor \(double_blocks"),
        (adding("layers.0.ffn_norm2.weight"), r"is \[2, 2\], and the other"),
        (lambda t: t.update({QKV: t[QKV][:-1]}), "must have a multiple of 3 rows"),
        (adding("dec_net.cond_embed.weight"), "computes pixels without a VAE"),
        (adding("siglip_embedder.0.weight"), "Omni"),
        (adding("layers.0.attention.to_qkv.qweight"), "Nunchaku"),
    ],
)
def test_other_files_are_refused(
    family: FamilyStore,
    tmp_path: Path,
    change: Change,
    message: str,
) -> None:
    tensors = foreign_layout.original_transformer()
    change(tensors)
    path = foreign_layout.write(tmp_path / "z.safetensors", tensors)
    names = set(family.store.list_tags())
    with pytest.raises(FormatError, match=message):
        family.create("refused", path)
    assert set(family.store.list_tags()) == names


def test_missing_pad_tokens_are_named(family: FamilyStore, tmp_path: Path) -> None:
    tensors = foreign_layout.mlx_transformer()
    del tensors["x_pad_token"], tensors["cap_pad_token"]
    root = shutil.copytree(family.path("mlx"), tmp_path / "mlx")
    foreign_layout.write(root / "weights.safetensors", tensors)
    with pytest.raises(UsageError, match="left out x_pad_token and cap_pad_token") as error:
        family.create("lossy", root, like=None)
    assert error.value.remedy == "like"
    assert digests(family.create("lossy", root)).items() > digests(family.tiny).items()


def test_two_models_in_a_directory_are_refused(family: FamilyStore, tmp_path: Path) -> None:
    root = shutil.copytree(family.path("comfyui"), tmp_path / "two")
    shutil.copy(root / "vae/ae.safetensors", root / "vae/other.safetensors")
    with pytest.raises(UsageError, match="have the vaes of two models"):
        family.create("two", root)
    (root / "vae/other.safetensors").write_bytes((root / "vae/ae.safetensors").read_bytes()[:-9])
    with pytest.raises(FormatError, match="is damaged"):
        family.create("two", root)


def test_quantized_mlx_files_are_read(family: FamilyStore, tmp_path: Path) -> None:
    root = shutil.copytree(family.path("mlx"), tmp_path / "mlx")
    tensors = foreign_layout.mlx_transformer()
    name = "layers.0.feed_forward.w2"
    del tensors[f"{name}.weight"]
    data = b"".join(np.ascontiguousarray(one).tobytes() for one in tensors.values())
    entries = [(key, "BF16", one.shape) for key, one in tensors.items()]
    entries += [(f"{name}.weight", "U32", (48, 32))]
    entries += [(f"{name}.{part}", "BF16", (48, 2)) for part in ("scales", "biases")]
    data += bytes(48 * 32 * 4 + 2 * 48 * 2 * 2)
    (root / "weights.safetensors").write_bytes(encode_header(entries) + data)
    made = family.create("quantized", root)
    layer = made.aimage.get_layer(f"transformer/{name}.weight")
    assert (layer.dtype, layer.shape) == ("int8", (48, 128))


def test_a_tokenizer_of_another_family_is_refused(family: FamilyStore, tmp_path: Path) -> None:
    path = sized(tmp_path) / "tokenizer/tokenizer.json"
    before = set(family.store.root.rglob("*"))
    path.write_bytes(path.read_bytes().replace(b"<|im_start|>", b"<start_of_turn>"))
    with pytest.raises(FormatError, match="the tokenizer is that of another family"):
        family.create("other", tmp_path, like=None)
    vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
    path.unlink()
    (path.parent / "vocab.json").write_text(json.dumps(vocabulary))
    (path.parent / "merges.txt").write_text("")
    with pytest.raises(FormatError, match="the tokenizer is that of another family"):
        family.create("other", tmp_path, like=None)
    assert set(family.store.root.rglob("*")) == before
    (path.parent / "added_tokens.json").write_text('{"<|im_start|>": 262, "<|im_end|>": 263}')
    assert family.create("older", tmp_path, like=None).aimage.properties["family"] == "z-image"


def test_only_another_layout_is_completed(family: FamilyStore) -> None:
    with pytest.raises(UsageError, match="only an image model in another layout"):
        family.create("diffusers", foreign_layout.TINY)
    with pytest.raises(AImageError):
        family.create("none", family.path("comfyui"), like=Reference.parse("absent"))

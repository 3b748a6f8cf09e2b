"""Tables of names: their counts and patterns, both ways, and what follows from shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.family import zimage_config, zimage_names
from clowder_aimage.family.component_names import ComponentNames, find_component
from clowder_aimage.family.image_family import Z_IMAGE
from clowder_aimage.family.name_table import TensorChange, TensorLocation
from clowder_aimage.family.tensor_change import restore
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.zimage.config import TransformerConfig, VaeConfig
from clowder_aimage.tensor.weight import SourceTensor

# the sizes of Z-Image-Turbo (zimage.md: 521 tensors, 6,154,908,736 parameters; 398; 244)
SIZES: dict[str, dict[str, Any]] = {
    "transformer": {
        "dim": 3840,
        "n_heads": 30,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "cap_feat_dim": 2560,
        "in_channels": 16,
    },
    "text_encoder": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "vae": {
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
    },
}
COUNTS = {"transformer": (521, 453), "text_encoder": (398, 398), "vae": (244, 244)}


@pytest.mark.parametrize("component", Z_IMAGE.components, ids=lambda one: one.name)
def test_every_layout_names_every_tensor_once(component: ComponentNames) -> None:
    shapes = component.shapes(SIZES[component.name])
    here, original = COUNTS[component.name]
    assert len(shapes) == here
    for dialect, table in component.dialects.items():
        theirs = {table.locate(name).name for name in shapes}
        assert len(theirs) == (original if dialect == "original" else here)
        found = component.locate(dialect, theirs)
        assert {name for one in theirs for name, _ in found[one]} == shapes.keys()
        named = find_component(component, theirs)
        assert named is not None and (named.dialect, named.prefix) == (dialect, "")


def test_names_are_those_of_comfyui() -> None:
    place = zimage_names.TRANSFORMER["original"].locate
    block = "noise_refiner.1.attention"
    assert place(f"{block}.to_k.weight") == TensorLocation(f"{block}.qkv.weight", 1, 3)
    assert place("all_final_layer.2-1.adaLN_modulation.1.bias").name == (
        "final_layer.adaLN_modulation.1.bias"
    )
    place = zimage_names.VAE["original"].locate
    up = "decoder.up.3.block.2.nin_shortcut.weight"
    assert place("decoder.up_blocks.0.resnets.2.conv_shortcut.weight").name == up
    attention = place("encoder.mid_block.attentions.0.to_out.0.weight")
    assert attention.name == "encoder.mid.attn_1.proj_out.weight"
    assert attention.change is TensorChange.UNIT_KERNEL


@pytest.mark.parametrize("component", Z_IMAGE.components, ids=lambda one: one.name)
def test_a_config_follows_from_shapes(component: ComponentNames) -> None:
    config = component.configure(component.shapes(SIZES[component.name]))
    assert {key: config[key] for key in component.sizes} == SIZES[component.name]
    assert component.check(config) is None
    parse: dict[str, Any] = {
        "transformer": TransformerConfig,
        "text_encoder": TextEncoderConfig,
        "vae": VaeConfig,
    }
    parse[component.name].parse("config.json", config)


def test_the_parameters_are_those_of_the_published_model() -> None:
    shapes = zimage_names.build_transformer_shapes(SIZES["transformer"])
    assert sum(shape[0] * (shape[1] if shape[1:] else 1) for shape in shapes.values()) == (
        6_154_908_736
    )
    assert zimage_config.SCHEDULER["shift"] == 3.0


def test_exchanged_halves_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(12)))
    tensor = SourceTensor("a", "U8", (4, 3), path, 0, 12, path.stat().st_mtime_ns)
    made = restore(tensor, "b", TensorLocation("a", change=TensorChange.HALVES))
    assert made.decoded is not None
    whole = b"".join(map(bytes, made.decoded.iter_bytes()))
    assert whole == bytes(range(6, 12)) + bytes(range(6))
    rows = made.slice_rows("c", 1, 3).decoded
    assert rows is not None and b"".join(map(bytes, rows.iter_bytes())) == whole[3:9]

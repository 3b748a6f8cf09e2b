"""Names of layers and of parts: every spelling is found, and nothing is guessed."""

from __future__ import annotations

import pytest

from clowder_aimage.adapter.names import find_unsupported_kind, split_name
from clowder_aimage.adapter.target import TargetTable
from tests.adapter.vectors import MODULES, flat, original, tiny_shapes, without_index

TABLE = TargetTable(tiny_shapes())
PREFIXES = (
    *("", "transformer.", "diffusion_model.", "model.diffusion_model.", "base_model.model."),
    *("base_model.model.transformer.", "base_model.model.diffusion_model.", "lora_unet_"),
    *("lora_transformer_", "lycoris_", "module.", "base_model.model.module.", "lora_unet_module_"),
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("spell", [str, original, without_index], ids=lambda spell: spell.__name__)
@pytest.mark.parametrize("is_flat", [False, True])
def test_every_layer_is_found(prefix: str, spell: object, is_flat: bool) -> None:
    assert callable(spell)
    for module in MODULES:
        name = flat(spell(module)) if is_flat else spell(module)
        found = TABLE.find(prefix + name)
        assert found is not None, name
        assert [part.tensor for part in found.rows] == [f"transformer/{module}.weight"]


@pytest.mark.parametrize("name", ["layers.0.attention.qkv", "lora_unet_layers_0_attention_qkv"])
def test_a_stacked_layer_is_three_tensors(name: str) -> None:
    found = TABLE.find(name)
    assert found is not None
    assert found.shape == (144, 48)
    assert [(part.tensor[-11:], part.start, part.stop) for part in found.rows] == [
        ("to_q.weight", 0, 48),
        ("to_k.weight", 48, 96),
        ("to_v.weight", 96, 144),
    ]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lora_te_layers_0_mlp_up_proj", "text_encoder/layers.0.mlp.up_proj.weight"),
        ("lora_te1_model_layers_0_mlp_up_proj", "text_encoder/layers.0.mlp.up_proj.weight"),
        ("text_encoder.model.layers.0.mlp.up_proj", "text_encoder/layers.0.mlp.up_proj.weight"),
        (
            "text_encoders.qwen3_4b.transformer.model.layers.0.mlp.up_proj",
            "text_encoder/layers.0.mlp.up_proj.weight",
        ),
        (
            "diffusion_model.layers.0.attention.q_norm",
            "transformer/layers.0.attention.norm_q.weight",
        ),
        ("transformer.x_pad_token", "transformer/x_pad_token"),
    ],
)
def test_other_layers_are_found(name: str, tensor: str) -> None:
    found = TABLE.find(name)
    assert found is not None
    assert found.rows[0].tensor == tensor


@pytest.mark.parametrize(
    "name",
    [
        *("", "transformer.", "layers.0", "layers.0.attention", "layers.9.attention.to_q"),
        *("layers.0.attention.to_q.weight", "lora_te_layers_0_attention_to_q"),
        *("lora_unet_layers_0_mlp_up_proj", "lora_te2_layers_0_mlp_up_proj", "transformer." * 99),
    ],
)
def test_other_names_are_not_found(name: str) -> None:
    assert TABLE.find(name) is None


def test_a_flattened_name_of_two_layers_is_the_name_of_neither() -> None:
    table = TargetTable({"transformer/a.b_c.weight": (1, 1), "transformer/a_b.c.weight": (1, 1)})
    assert table.find("lora_unet_a_b_c") is None
    found = table.find("transformer.a_b.c")
    assert found is not None
    assert found.module == "a_b.c"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("x.lora_A.weight", ("x", "down")),
        ("x.lora_A.default.weight", ("x", "down")),
        ("x.lora_A.my-style.weight", ("x", "down")),
        ("x.lora_A", ("x", "down")),
        ("x.lora_down.weight", ("x", "down")),
        ("x.lora.up.weight", ("x", "up")),
        ("x.lora_linear_layer.up.weight", ("x", "up")),
        ("x.to_q_lora.down.weight", ("x.to_q", "down")),
        ("x.lora_B.bias", ("x", "up_bias")),
        ("x.lora_up.bias", ("x", "up_bias")),
        ("x.lora_B.default.bias", ("x", "up_bias")),
        ("x.lora_magnitude_vector", ("x", "magnitude")),
        ("x.lora_magnitude_vector.default.weight", ("x", "magnitude")),
        ("x.lora_embedding_A", ("x", "embedding_down")),
        ("x.alpha", ("x", "alpha")),
        ("use_rslora_flag", ("", "use_rslora_flag")),
        ("x.w_norm", ("x", "diff")),
        ("x.modules_to_save.default.weight", ("x", "set_weight")),
        ("x.modules_to_save.bias", ("x", "set_bias")),
        ("x.hada_w1_a", ("x", "hada_w1_a")),
        ("x.lokr_w2_b", ("x", "lokr_w2_b")),
        ("x.lora_A.bias", None),
        ("x.weight", None),
        ("layers.alpha.0", None),
        ("snake_alpha", None),
        ("x.lora_A.a.b.weight", None),
        ("x.lora_mid.weight", None),
    ],
)
def test_a_name_is_split(name: str, split: tuple[str, str] | None) -> None:
    assert split_name(name) == split


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.oft_blocks", "OFT"),
        ("x.oft_R.default.weight", "OFT"),
        ("x.boft_R", "BOFT"),
        ("x.a1.weight", "GLoRA"),
        ("x.on_input", "(IA)^3"),
        ("x.ia3_l", "(IA)^3"),
        ("x.lora_mid.weight", "LoRA in Tucker form"),
        ("x.hada_t1", "LoHa in Tucker form"),
        ("x.lokr_t2", "LoKr in Tucker form"),
        ("x.vera_lambda_b", "VeRA"),
        ("lora_controlnet", "Control-LoRA"),
    ],
)
def test_other_kinds_are_recognised(name: str, kind: str) -> None:
    assert kind in str(find_unsupported_kind(name))
    assert split_name(name) is None
    assert find_unsupported_kind("layers.0.attention.to_q.weight") is None

"""The rule for weights that are not quantized: names of Z-Image, FLUX.2 and language models."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from clowder_aimage.family import image_family
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.kept_weight import MAX_ROW, KeepRule
from clowder_aimage.tensor.quantization import ROW_SCALED

Z_IMAGE = {"dim": 3840, "n_heads": 30, "n_layers": 30, "n_refiner_layers": 2}
Z_IMAGE |= {"cap_feat_dim": 2560, "in_channels": 16}
KLEIN = {"attention_head_dim": 128, "num_attention_heads": 24, "in_channels": 128}
KLEIN |= {"joint_attention_dim": 7680, "num_layers": 5, "num_single_layers": 20}
Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(family: str, config: Mapping[str, int]) -> Shapes:
    """Return the shapes of a transformer of full size."""
    found = image_family.find_family(family)
    assert found is not None
    return found.get_component("transformer").shapes(config)


def reasons(shapes: Shapes, quantization: Quantization = ROW_SCALED) -> dict[str, str | None]:
    rule = KeepRule.of(quantization, shapes)
    return {name: rule.find_reason(name, "BF16", shape) for name, shape in shapes.items()}


def test_sensitive_layers_of_z_image_are_kept() -> None:
    found = reasons(shapes_of("z-image", Z_IMAGE))
    assert found["layers.0.attention.to_q.weight"] == "first block"
    assert found["layers.29.feed_forward.w3.weight"] == "last block"
    assert found["layers.7.adaLN_modulation.0.weight"] == "modulation"
    assert found["noise_refiner.1.adaLN_modulation.0.bias"] == "modulation"
    assert found["all_final_layer.2-1.adaLN_modulation.1.weight"] == "final layer"
    assert {found[f"{name}.weight"] for name in ("t_embedder.mlp.0", "cap_embedder.1")} == {
        "embedder"
    }
    quantized = {name for name, reason in found.items() if reason is None}
    blocks = {name.rsplit(".", 3)[0] for name in quantized if "to_out" not in name}
    assert len(quantized) == 7 * (28 + 4)
    assert {name for name in blocks if name.startswith("layers.")} == {
        f"layers.{number}" for number in range(1, 29)
    }


def test_sensitive_layers_of_flux2_are_kept() -> None:
    found = reasons(shapes_of("flux2", KLEIN))
    assert found["transformer_blocks.0.ff.linear_in.weight"] == "first block"
    assert found["single_transformer_blocks.19.attn.to_out.weight"] == "last block"
    assert found["double_stream_modulation_img.linear.weight"] == "modulation"
    assert found["proj_out.weight"] == "final layer"
    assert found["context_embedder.weight"] == "embedder"
    assert found["norm_out.linear.weight"] == "norm"
    assert sum(reason is None for reason in found.values()) == 4 * 12 - 2 + 19 * 2 + 2
    for name in ("transformer_blocks.4.attn.to_q", "single_transformer_blocks.0.attn.to_out"):
        assert found[f"{name}.weight"] is None


@pytest.mark.parametrize(
    ("family", "config", "share"), [("z-image", Z_IMAGE, 0.5544), ("flux2", KLEIN, 0.5861)]
)
def test_a_transformer_takes_about_half_of_bf16(
    family: str, config: Mapping[str, int], share: float
) -> None:
    shapes = shapes_of(family, config)
    found = reasons(shapes)
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    size = sum(
        count * (1 + 1 / 32) if found[name] is None else 2 * count
        for name, count in elements.items()
    )
    assert size / (2 * sum(elements.values())) == pytest.approx(share, abs=1e-4)


def test_each_network_of_a_component_has_a_first_and_a_last_block() -> None:
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in (0, 1, 9, 10)]
    names += [f"visual.blocks.{number}.attn.qkv.weight" for number in range(3)]
    names += ["model.layers.10.experts.layers.3.w.weight", "lm_head.weight"]
    found = reasons(dict.fromkeys(names, (64, 64)))
    assert [found[name] for name in names[:4]] == ["first block", None, None, "last block"]
    assert [found[name] for name in names[4:7]] == ["first block", None, "last block"]
    assert [found[name] for name in names[7:]] == ["last block", "final layer"]


@pytest.mark.parametrize("kind", ["int8", "mxfp8"])
def test_scales_of_groups_need_no_sensitive_layers(kind: str) -> None:
    names = ["layers.0.attention.to_q.weight", "layers.0.adaLN_modulation.0.weight"]
    found = reasons(dict.fromkeys(names, (64, 64)), Quantization.parse(kind))
    assert set(found.values()) == {None}


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((64, 72), "rows no multiple of 32"),
        ((1, 2 * MAX_ROW), f"rows of more than {MAX_ROW} values"),
        ((2, 64), "under 1024 elements"),
        ((1, MAX_ROW), None),
    ],
)
def test_rows_have_whole_groups_and_fit_into_memory(
    shape: tuple[int, ...], reason: str | None
) -> None:
    assert KeepRule.of(ROW_SCALED, ["w"]).find_reason("w", "BF16", shape) == reason

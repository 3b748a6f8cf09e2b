"""Configurations as transformers and diffusers write them, and the ones that are refused."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.rope import build_axes_table, build_text_table
from clowder_aimage.model.flow.scheduler import FlowScheduler
from clowder_aimage.model.zimage.config import TransformerConfig, VaeConfig
from clowder_aimage.tensor.config_fields import MAX_LAYERS, ConfigFields, parse_object

TINY = Path(__file__).parents[2] / "examples" / "tiny"
# Qwen3-4B as the hub has it with Z-Image: transformers 4 wrote it.
HUB_TEXT_ENCODER: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 2,
}


def tiny(name: str) -> dict[str, Any]:
    value = json.loads((TINY / name).read_text())
    assert isinstance(value, dict)
    return value


def text(**changes: Any) -> TextEncoderConfig:
    return TextEncoderConfig.parse("text_encoder/config.json", HUB_TEXT_ENCODER | changes)


def test_hub_text_encoder() -> None:
    config = text()
    assert (config.num_hidden_layers, config.head_dim, config.rms_norm_eps) == (36, 128, 1e-6)
    assert config.rope.theta == 1e6
    assert config.qk_norm
    assert not config.qkv_bias
    assert config.windows == (None,) * 36


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": None},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta_of_both_generations(rope: dict[str, Any]) -> None:
    assert text(**rope).rope.theta == 5e5


def test_linear_and_yarn() -> None:
    plain = build_text_table(text().rope, 4)
    linear = build_text_table(text(rope_scaling={"type": "linear", "factor": 2.0}).rope, 7)
    np.testing.assert_allclose(np.array(linear[0])[::2], np.array(plain[0]), atol=1e-6)
    yarn = text(
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        }
    ).rope
    assert yarn.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def test_qwen2() -> None:
    config = TextEncoderConfig.parse("c", QWEN2)
    assert config.qkv_bias
    assert not config.output_bias
    assert not config.qk_norm
    assert config.head_dim == 4
    assert config.windows == (None,) * 4
    sliding = TextEncoderConfig.parse("c", QWEN2 | {"use_sliding_window": True})
    assert sliding.windows == (None, None, 4096, 4096)


MLX = {"group_size": 64, "bits": 4}
READABLE: list[dict[str, Any]] = [
    {"quantization": MLX | {"mode": "affine"}, "quantization_config": MLX},
    {"quantization": MLX | {"layers.0.mlp.down_proj": False}},
    {"quantization": MLX | {"layers.0.mlp.down_proj": {"bits": 4, "mode": "mxfp4"}}},
    {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {}}},
    {"quantization_config": None},
]
UNREADABLE: list[Any] = [
    {},
    "int4",
    MLX | {"bits": 6},
    MLX | {"group_size": 48},
    MLX | {"layers.0.mlp.down_proj": {"group_size": 64, "bits": 3}},
    MLX | {"layers.0.mlp.down_proj": {"bits": 8, "mode": "nvfp4"}},
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": 1}}},
]


@pytest.mark.parametrize("changes", READABLE)
def test_quantizations_that_the_blobs_tell(changes: dict[str, Any]) -> None:
    assert text(**changes) == text()
    for kind, file in ((TransformerConfig, "transformer"), (VaeConfig, "vae")):
        values = tiny(f"{file}/config.json")
        assert kind.parse("c", values | changes) == kind.parse("c", values)


@pytest.mark.parametrize("value", UNREADABLE)
def test_unsupported_quantizations_are_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"quantization = .*unsupported quantization"):
        text(quantization=value)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_every_component_refuses_unsupported_quantizations(key: str) -> None:
    for kind, file in ((TransformerConfig, "transformer"), (VaeConfig, "vae")):
        with pytest.raises(ModelError, match=f"{key} = .*unsupported quantization"):
            kind.parse("c", tiny(f"{file}/config.json") | {key: "int4"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "only qwen3 and qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 5}, "must divide"),
        ({"hidden_size": None}, "missing field hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": MAX_LAYERS + 1}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"head_dim": 7}, "even"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "only default, linear, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "missing field factor"),
        ({"rope_scaling": "yes"}, "must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 36}, "linear_attention"),
    ],
)
def test_text_encoders_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        text(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"all_patch_size": [1, 2]}, "all_patch_size"),
        ({"all_f_patch_size": [2]}, "all_f_patch_size"),
        ({"axes_dims": [8, 8]}, "three axes"),
        ({"axes_dims": [8, 8, 16]}, "add up"),
        ({"axes_dims": [7, 9, 8]}, "even"),
        ({"axes_lens": [0, 1, 1]}, "axes_lens"),
    ],
)
def test_transformers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TransformerConfig.parse("c", tiny("transformer/config.json") | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act_fn": "relu"}, "act_fn"),
        ({"latents_mean": [0.0]}, "latents_mean"),
        ({"shift_factor": None}, "missing field shift_factor"),
        ({"scaling_factor": 0}, "scaling_factor"),
        ({"norm_num_groups": 3}, "norm_num_groups"),
        ({"up_block_types": ["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]}, "up_block_types"),
        ({"block_out_channels": []}, "block_out_channels"),
        ({"use_post_quant_conv": 1}, "use_post_quant_conv"),
        ({"new": 1}, "unknown fields new"),
    ],
)
def test_vaes_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        VaeConfig.parse("c", tiny("vae/config.json") | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "DDIMScheduler"}, "_class_name"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas"),
        ({"stochastic_sampling": True}, "stochastic_sampling"),
        ({"use_karras_sigmas": True, "use_exponential_sigmas": True}, "conflicts with"),
        ({"time_shift_type": "cosine"}, "time_shift_type"),
        ({"shift_terminal": 1.0}, "shift_terminal"),
        (
            {"use_dynamic_shifting": True, "base_image_seq_len": 9, "max_image_seq_len": 9},
            "max_image_seq_len",
        ),
        ({"sigma_min": 0.1}, "unknown fields sigma_min"),
    ],
)
def test_schedulers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        FlowScheduler.parse("c", tiny("scheduler/scheduler_config.json") | changes)


def test_turbo_schedule() -> None:
    """Eight steps with shift 3: as diffusers prints them."""
    sigmas = FlowScheduler.parse("c", {"shift": 3.0}).schedule(8, 4096).sigmas
    expected = [1.0, 0.95454544, 0.9, 0.8333333, 0.75, 0.6428571, 0.5, 0.3, 0.0]
    np.testing.assert_allclose(sigmas, expected, atol=1e-6)


def test_shift_of_a_request_and_dynamic_shifting_exclude_each_other() -> None:
    scheduler = FlowScheduler.parse("c", {"use_dynamic_shifting": True})
    with pytest.raises(UsageError, match="shift"):
        scheduler.schedule(4, 16, 3.0)


@pytest.mark.parametrize("data", [b"[1]", b"\xff", b"[" * 100_000])
def test_files_that_are_not_json_objects(data: bytes) -> None:
    gc.collect()  # of what others left: a finalizer that runs this deep fails
    with pytest.raises(ModelError, match=r"vae/config\.json"):
        parse_object("vae/config.json", data)


def test_private_and_null_fields_are_not_unknown() -> None:
    fields = ConfigFields("c", {"_note": 1, "later": None, "read": 2})
    fields.get_integer("read")
    fields.finish()


EXTREMES: tuple[Any, ...] = (
    *(10**400, 10**300, 1e308, -1e308, 5e-324, 1e-300, 1e30, -1e30, 1e15, 2**63, 2**31, 2**24),
    *(-1, 0, 0.0, 1, 1.0, 0.5, 3, -14.42695, True, "1", [1], {}, None),
    *(float("inf"), float("nan")),
)
YARN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False}
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 4}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.02,
}
SPACINGS: list[dict[str, Any]] = [
    {},
    {"use_karras_sigmas": True},
    {"use_exponential_sigmas": True},
    {"use_dynamic_shifting": True},
    {"use_dynamic_shifting": True, "time_shift_type": "linear"},
]


def schedules(value: dict[str, Any]) -> None:
    for spacing in SPACINGS:
        found = FlowScheduler.parse("x", value | spacing)
        for steps, tokens in ((2, 4), (4, 1 << 14)):
            schedule = found.schedule(steps, tokens)
            assert np.isfinite(schedule.sigmas).all() and np.isfinite(schedule.times).all()


def encodes(value: dict[str, Any]) -> None:
    config = TextEncoderConfig.parse("x", value)
    assert config.num_attention_heads * config.head_dim < 1 << 31
    if config.head_dim <= 4096:
        cosines, sines = build_text_table(config.rope, 3)
        assert np.isfinite(np.array(cosines)).all() and np.isfinite(np.array(sines)).all()


def transforms(value: dict[str, Any]) -> None:
    config = TransformerConfig.parse("x", value)
    if config.head_dim <= 4096:
        table = build_axes_table(np.zeros((2, 3), np.int64), config.axes_dims, config.rope_theta)
        assert np.isfinite(np.array(table[0])).all()


def decodes(value: dict[str, Any]) -> None:
    config = VaeConfig.parse("x", value)
    assert np.isfinite(np.float32(1) / np.float32(config.scaling_factor))


READERS: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any]]] = {
    "scheduler": (schedules, SCHEDULER),
    "text_encoder": (encodes, HUB_TEXT_ENCODER | SMALL),
    "yarn": (encodes, HUB_TEXT_ENCODER | SMALL | {"rope_parameters": YARN}),
    "transformer": (transforms, tiny("transformer/config.json")),
    "vae": (decodes, tiny("vae/config.json")),
}


def changed(value: dict[str, Any], new: object) -> Iterator[dict[str, Any]]:
    """Yield an object with each of its fields, and each pair of inner fields, replaced."""
    for key, old in value.items():
        yield value | {key: new}
        if isinstance(old, dict):
            yield from (value | {key: inner} for inner in changed(old, new))
        elif isinstance(old, list):
            yield value | {key: [new] * len(old)}


@pytest.mark.parametrize("name", READERS)
def test_an_extreme_number_is_computed_with_or_refused(name: str) -> None:
    """No other error, no NaN, and no warning, which is an error in tests."""
    read, value = READERS[name]
    read(value)
    for new in EXTREMES:
        for config in changed(value, new):
            with suppress(ModelError):
                read(config)

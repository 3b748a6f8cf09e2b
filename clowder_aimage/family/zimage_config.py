"""Configs of Z-Image's components: derived from shapes, completed by the family's values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clowder_aimage.family.component_names import Shapes

# Channels of a head for caption, height and width; shapes do not have them.
AXES = (32, 48, 48)
# Groups of the VAE's norms; shapes do not have them.
GROUPS = 32

SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": False,
    "shift": 3.0,
}


def get_length(shapes: Shapes, name: str, axis: int = 0) -> int:
    """Return a length of a tensor, 1 for a missing tensor or axis."""
    # Divisors of configs must not be zero for incomplete or damaged files.
    shape = shapes.get(name, ())
    return max(1, shape[axis]) if axis < len(shape) else 1


def count_blocks(shapes: Shapes, pattern: str) -> int:
    """Return the number of blocks by the numbers that ``pattern`` captures, at least 1."""
    matches = (re.match(pattern, name) for name in shapes)
    return max((int(match[1]) + 1 for match in matches if match), default=1)


def build_transformer_config(shapes: Shapes) -> dict[str, Any]:
    """Return the config of a ``ZImageTransformer2DModel``."""
    dim = get_length(shapes, "cap_embedder.1.weight")
    head = get_length(shapes, "layers.0.attention.norm_q.weight")
    heads = max(1, dim // head)
    return {
        "_class_name": "ZImageTransformer2DModel",
        "all_f_patch_size": [1],
        "all_patch_size": [2],
        "axes_dims": list(AXES),
        "axes_lens": [1536, 512, 512],
        "cap_feat_dim": get_length(shapes, "cap_embedder.0.weight"),
        "dim": dim,
        "in_channels": max(1, get_length(shapes, "all_x_embedder.2-1.weight", 1) // 4),
        "n_heads": heads,
        "n_kv_heads": heads,
        "n_layers": count_blocks(shapes, r"layers\.([0-9]+)\."),
        "n_refiner_layers": count_blocks(shapes, r"(?:noise|context)_refiner\.([0-9]+)\."),
        "norm_eps": 1e-05,
        "qk_norm": True,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
    }


def build_text_encoder_config(shapes: Shapes) -> dict[str, Any]:
    """Return the config of a ``Qwen3Model``."""
    layer = "model.layers.0.self_attn"
    head = get_length(shapes, f"{layer}.q_norm.weight")
    return {
        "architectures": ["Qwen3Model"],
        "attention_bias": False,
        "head_dim": head,
        "hidden_act": "silu",
        "hidden_size": get_length(shapes, "model.embed_tokens.weight", 1),
        "intermediate_size": get_length(shapes, "model.layers.0.mlp.gate_proj.weight"),
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": max(1, get_length(shapes, f"{layer}.q_proj.weight") // head),
        "num_hidden_layers": count_blocks(shapes, r"model\.layers\.([0-9]+)\."),
        "num_key_value_heads": max(1, get_length(shapes, f"{layer}.k_proj.weight") // head),
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": get_length(shapes, "model.embed_tokens.weight"),
    }


def build_vae_config(shapes: Shapes) -> dict[str, Any]:
    """Return the config of an ``AutoencoderKL``."""
    levels = count_blocks(shapes, r"encoder\.down_blocks\.([0-9]+)\.")
    channels = [
        get_length(shapes, f"encoder.down_blocks.{level}.resnets.0.conv1.weight")
        for level in range(levels)
    ]
    return {
        "_class_name": "AutoencoderKL",
        "act_fn": "silu",
        "block_out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "force_upcast": True,
        "in_channels": get_length(shapes, "encoder.conv_in.weight", 1),
        "latent_channels": get_length(shapes, "decoder.conv_in.weight", 1),
        "layers_per_block": count_blocks(
            shapes, r"encoder\.down_blocks\.[0-9]+\.resnets\.([0-9]+)\."
        ),
        "mid_block_add_attention": True,
        "norm_num_groups": GROUPS,
        "out_channels": get_length(shapes, "decoder.conv_out.weight"),
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    }


def check_transformer(config: Mapping[str, Any]) -> str | None:
    """Return the reason against a transformer of these sizes as Z-Image, or None."""
    head = config["dim"] // config["n_heads"]
    if sum(config["axes_dims"]) == head:
        return None
    return f"the heads have {head} channels, and those of the family {sum(config['axes_dims'])}"


def check_vae(config: Mapping[str, Any]) -> str | None:
    """Return the reason against a VAE of these sizes, or None."""
    groups = config["norm_num_groups"]
    if not any(count % groups for count in config["block_out_channels"]):
        return None
    return f"channels of {config['block_out_channels']} do not divide into {groups} groups"


def build_widest_transformer(count: int) -> dict[str, Any]:
    """Return a config with ``count`` blocks of each kind."""
    sizes = {"dim": 8, "n_heads": 1, "cap_feat_dim": 1, "in_channels": 1}
    return {**sizes, "n_layers": count, "n_refiner_layers": count}


def build_widest_text_encoder(count: int) -> dict[str, Any]:
    """Return a config with ``count`` layers."""
    heads = {"head_dim": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes = {"hidden_size": 1, "intermediate_size": 1, "vocab_size": 1}
    return {**heads, **sizes, "num_hidden_layers": count}


def build_widest_vae(_: int) -> dict[str, Any]:
    """Return a config of four levels with two blocks, each with a shortcut."""
    # A shortcut exists where the channels change: hence different channels for each level.
    ends = {"in_channels": 1, "out_channels": 1, "latent_channels": 1}
    return {**ends, "block_out_channels": [1, 2, 3, 4], "layers_per_block": 2}


def build_mlx_config(config: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return the ``config.json`` of Z-Image-Turbo-MLX for a transformer's config."""
    return {
        "hidden_size": config["dim"],
        "num_attention_heads": config["n_heads"],
        "intermediate_size": int(config["dim"] / 3 * 8),
        "num_hidden_layers": config["n_layers"],
        "n_refiner_layers": config["n_refiner_layers"],
        "in_channels": config["in_channels"],
        "text_embed_dim": config["cap_feat_dim"],
        "patch_size": 2,
        "rope_theta": config["rope_theta"],
        "axes_dims": config["axes_dims"],
        "axes_lens": config["axes_lens"],
        "precision": precision,
    }

"""The configurations of components that families share, as diffusers and transformers write them.

Both forms of transformers, versions 4 and 5, are read. An unsupported value is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.model.rope_config import RopeConfig
from clowder_aimage.model.rope_setting import ALL, list_rope_settings
from clowder_aimage.tensor.config_fields import MAX_LAYERS, MAX_SIZE, ConfigFields

# Of a configuration without one (transformers, Qwen3Config and Qwen2Config)
_LENGTH = 32768


@dataclass(frozen=True, slots=True)
class TextEncoderConfig:
    """A Qwen3 or Qwen2 decoder, up to its second to last hidden state."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    # Per layer: tokens of context, or None for all
    windows: tuple[int | None, ...]
    rope: RopeConfig

    def is_unused(self, name: str, layers: int) -> bool:
        """Return True if the first ``layers`` layers, without the last norm, lack a tensor."""
        if name in ("norm.weight", "lm_head.weight"):
            return True
        layer = re.match(r"layers\.([0-9]{1,6})\.", name)
        return layer is not None and layers <= int(layer[1]) < self.num_hidden_layers

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> TextEncoderConfig:
        """Read ``text_encoder/config.json`` as transformers 4 or 5 wrote it.

        Raises:
            ModelError: A field is missing, malformed or unsupported.
        """
        fields = ConfigFields(name, values)
        model_type = fields.get_text("model_type")
        if model_type not in ("qwen3", "qwen2"):
            raise fields.refuse("model_type", "only qwen3 and qwen2 text encoders are supported")
        fields.accept_quantization()
        fields.check_value("hidden_act", "silu")
        hidden, heads = fields.get_integer("hidden_size"), fields.get_integer("num_attention_heads")
        kv_heads = fields.get_integer("num_key_value_heads", heads)
        # The defaults of transformers: Qwen3Config has a constant, Qwen2 derives it
        head_dim = fields.get_integer("head_dim", 128 if model_type == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise fields.refuse("num_key_value_heads", f"must divide {heads} attention heads")
        # Rotary positions turn pairs of channels
        if head_dim % 2:
            raise fields.refuse("head_dim", "must be even")
        # Both numbers are untrusted, and each alone may be within its limit
        if heads * head_dim > MAX_SIZE:
            raise fields.refuse("head_dim", f"times {heads} attention heads exceeds {MAX_SIZE}")
        layers = fields.get_integer("num_hidden_layers", maximum=MAX_LAYERS)
        qwen3 = model_type == "qwen3"
        attention_bias = fields.get_boolean("attention_bias", False) if qwen3 else False
        return cls(
            vocab_size=fields.get_integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.get_integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.get_positive("rms_norm_eps", 1e-6, maximum=1.0),
            # Qwen2 always has these biases, and none after attention
            qkv_bias=attention_bias or not qwen3,
            output_bias=attention_bias,
            qk_norm=qwen3,
            windows=_parse_windows(fields, layers),
            rope=_parse_rope(fields, head_dim),
        )


def _parse_rope(fields: ConfigFields, dim: int) -> RopeConfig:
    settings = list_rope_settings(fields.values)
    if settings.keys() != {ALL}:
        raise fields.refuse("rope_parameters", "differences between layers are not supported")
    rope = ConfigFields(fields.name, settings[ALL])
    rope.check_value("partial_rotary_factor", 1.0)
    return RopeConfig.parse(
        fields.name, rope.values, dim, fields.get_integer("max_position_embeddings", _LENGTH)
    )


def _parse_windows(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer; None without ``use_sliding_window``."""
    window = None
    if fields.get_boolean("use_sliding_window", False):
        window = fields.get_integer("sliding_window", 4096)
    first_windowed = fields.get_raw("max_window_layers", 28)
    default = [
        "sliding_attention" if window is not None and index >= first_windowed else "full_attention"
        for index in range(layers)
    ]
    kinds = fields.get_raw("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise fields.refuse("layer_types", f"must list {layers} layers")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise fields.refuse("layer_types", f"unknown {sorted(map(str, unknown))}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


@dataclass(frozen=True, slots=True)
class AutoencoderConfig:
    """An autoencoder of residual blocks, without the scale of its latents.

    ``read`` has the arguments of the constructor, for those of a family.
    """

    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    use_post_quant_conv: bool
    use_quant_conv: bool
    mid_block_add_attention: bool

    @property
    def scale(self) -> int:
        """Return the pixels per latent cell, in each dimension."""
        return int(2 ** (len(self.block_out_channels) - 1))

    @property
    def widest(self) -> int:
        """Return the channels of the widest layer at full size."""
        return max(self.block_out_channels[:2])

    @staticmethod
    def read(
        fields: ConfigFields, widths: tuple[int, ...] = (64,), layers: int = 1, latents: int = 4
    ) -> dict[str, Any]:
        """Read the fields of this class, with the defaults of ``AutoencoderKL``.

        Raises:
            ModelError: A field is missing, malformed or unsupported.
        """
        if fields.get_text("act_fn", "silu") not in ("silu", "swish"):
            raise fields.refuse("act_fn", "only silu is supported")
        channels = fields.get_integers("block_out_channels", widths)
        if not 1 <= len(channels) <= 8:
            raise fields.refuse("block_out_channels", "must have 1 to 8 entries")
        fields.check_value("down_block_types", ["DownEncoderBlock2D"] * len(channels))
        fields.check_value("up_block_types", ["UpDecoderBlock2D"] * len(channels))
        groups = fields.get_integer("norm_num_groups", 32)
        if any(count % groups for count in channels):
            raise fields.refuse("norm_num_groups", f"must divide all of {list(channels)}")
        return {
            "out_channels": fields.get_integer("out_channels", 3, maximum=4096),
            "latent_channels": fields.get_integer("latent_channels", latents, maximum=4096),
            "block_out_channels": channels,
            "layers_per_block": fields.get_integer("layers_per_block", layers, maximum=64),
            "norm_num_groups": groups,
            "use_post_quant_conv": fields.get_boolean("use_post_quant_conv", True),
            "use_quant_conv": fields.get_boolean("use_quant_conv", True),
            "mid_block_add_attention": fields.get_boolean("mid_block_add_attention", True),
        }

    @staticmethod
    def finish(fields: ConfigFields, *ignored: str) -> None:
        """Reject fields that were not read. Raises ModelError."""
        fields.accept_quantization()
        fields.finish(
            "in_channels", "sample_size", "force_upcast", "torch_dtype", "dtype", *ignored
        )

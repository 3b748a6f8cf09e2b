"""The configurations of Z-Image's components, as diffusers and transformers (4 and 5) write them.

An unsupported value is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.model.zimage.rope import MIN_THETA, RopeConfig
from clowder_aimage.tensor.config_fields import MAX_LAYERS, MAX_SIZE, ConfigFields

_MAX_SCALE = 1e6
PATCH = 2  # the patch size that ZImagePipeline uses


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """``ZImageTransformer2DModel``. Lengths are in tokens, sizes in channels."""

    in_channels: int
    dim: int
    n_layers: int
    n_refiner_layers: int
    n_heads: int
    norm_eps: float
    qk_norm: bool
    cap_feat_dim: int
    rope_theta: float
    t_scale: float
    axes_dims: tuple[int, ...]
    axes_lens: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        """Return the channels of one attention head."""
        return self.dim // self.n_heads

    @property
    def ffn_dim(self) -> int:
        """Return the hidden channels of the feed-forward network, computed as in the reference."""
        return int(self.dim / 3 * 8)

    @property
    def modulation_dim(self) -> int:
        """Return the channels of the time embedding that modulates the blocks."""
        return min(self.dim, 256)

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> TransformerConfig:
        """Read ``transformer/config.json``.

        ``n_kv_heads`` is not read: the reference ignores it and gives every head its own keys
        and values, and the strict load would detect other weights.

        Raises:
            ModelError: A field is missing, malformed or unsupported.
        """
        fields = ConfigFields(name, values)
        fields.only("all_patch_size", [PATCH])
        fields.only("all_f_patch_size", [1])
        config = cls(
            in_channels=fields.integer("in_channels", 16, maximum=4096),
            dim=fields.integer("dim", 3840),
            n_layers=fields.integer("n_layers", 30, maximum=MAX_LAYERS),
            n_refiner_layers=fields.integer("n_refiner_layers", 2, maximum=MAX_LAYERS),
            n_heads=fields.integer("n_heads", 30),
            norm_eps=fields.positive("norm_eps", 1e-5, maximum=1.0),
            qk_norm=fields.boolean("qk_norm", True),
            cap_feat_dim=fields.integer("cap_feat_dim", 2560),
            rope_theta=fields.number("rope_theta", 256.0, minimum=MIN_THETA),
            t_scale=fields.number("t_scale", 1000.0, minimum=-_MAX_SCALE, maximum=_MAX_SCALE),
            axes_dims=fields.integers("axes_dims", (32, 48, 48)),
            axes_lens=fields.integers("axes_lens", (1024, 512, 512)),
        )
        fields.accept_quantization()
        fields.finish("n_kv_heads", "siglip_feat_dim", "torch_dtype", "dtype")
        if len(config.axes_dims) != 3 or len(config.axes_lens) != 3:
            raise fields.refuse("axes_dims", "Z-Image has three axes: caption, height, width")
        if sum(config.axes_dims) != config.head_dim or any(d % 2 for d in config.axes_dims):
            raise fields.refuse(
                "axes_dims", f"must be even and add up to dim / n_heads = {config.head_dim}"
            )
        return config


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
    windows: tuple[int | None, ...]  # per layer: tokens of context, or None for all
    rope: RopeConfig

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> TextEncoderConfig:
        """Read ``text_encoder/config.json`` as transformers 4 or 5 wrote it.

        Raises:
            ModelError: A field is missing, malformed or unsupported.
        """
        fields = ConfigFields(name, values)
        model_type = fields.text("model_type")
        if model_type not in ("qwen3", "qwen2"):
            raise fields.refuse("model_type", "only qwen3 and qwen2 text encoders are supported")
        fields.accept_quantization()
        fields.only("hidden_act", "silu")
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        head_dim = fields.integer("head_dim", 128 if model_type == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise fields.refuse("num_key_value_heads", f"must divide {heads} attention heads")
        if head_dim % 2:
            raise fields.refuse("head_dim", "must be even")
        if heads * head_dim > MAX_SIZE:
            raise fields.refuse("head_dim", f"times {heads} attention heads exceeds {MAX_SIZE}")
        layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
        qwen3 = model_type == "qwen3"
        attention_bias = fields.boolean("attention_bias", False) if qwen3 else False
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6, maximum=1.0),
            qkv_bias=attention_bias or not qwen3,
            output_bias=attention_bias,
            qk_norm=qwen3,
            windows=_windows(fields, layers),
            rope=RopeConfig.parse(fields, head_dim),
        )


def _windows(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer; None without ``use_sliding_window``."""
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.integer("sliding_window", 4096)
    first = fields.raw("max_window_layers", 28)
    default = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(layers)
    ]
    kinds = fields.raw("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise fields.refuse("layer_types", f"must list {layers} layers")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise fields.refuse("layer_types", f"unknown {sorted(map(str, unknown))}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


@dataclass(frozen=True, slots=True)
class VaeConfig:
    """``AutoencoderKL``."""

    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    scaling_factor: float
    shift_factor: float
    use_post_quant_conv: bool
    use_quant_conv: bool
    mid_block_add_attention: bool

    @property
    def scale(self) -> int:
        """Return the pixels per latent cell, in each dimension."""
        return int(2 ** (len(self.block_out_channels) - 1))

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> VaeConfig:
        """Read ``vae/config.json``.

        ``shift_factor`` is required: the reference cannot decode without one.

        Raises:
            ModelError: A field is missing, malformed or unsupported.
        """
        fields = ConfigFields(name, values)
        for key in ("latents_mean", "latents_std"):
            if fields.raw(key) is not None:
                raise fields.refuse(key, "Z-Image scales latents by one factor, not by channel")
        if fields.text("act_fn", "silu") not in ("silu", "swish"):
            raise fields.refuse("act_fn", "only silu is supported")
        channels = fields.integers("block_out_channels", (64,))
        if not 1 <= len(channels) <= 8:
            raise fields.refuse("block_out_channels", "must have 1 to 8 entries")
        fields.only("down_block_types", ["DownEncoderBlock2D"] * len(channels))
        fields.only("up_block_types", ["UpDecoderBlock2D"] * len(channels))
        groups = fields.integer("norm_num_groups", 32)
        if any(count % groups for count in channels):
            raise fields.refuse("norm_num_groups", f"must divide all of {list(channels)}")
        config = cls(
            out_channels=fields.integer("out_channels", 3, maximum=4096),
            latent_channels=fields.integer("latent_channels", 4, maximum=4096),
            block_out_channels=channels,
            layers_per_block=fields.integer("layers_per_block", 1, maximum=64),
            norm_num_groups=groups,
            scaling_factor=fields.number("scaling_factor", 0.18215, minimum=1e-6, maximum=1e6),
            shift_factor=fields.number("shift_factor", minimum=-_MAX_SCALE, maximum=_MAX_SCALE),
            use_post_quant_conv=fields.boolean("use_post_quant_conv", True),
            use_quant_conv=fields.boolean("use_quant_conv", True),
            mid_block_add_attention=fields.boolean("mid_block_add_attention", True),
        )
        fields.accept_quantization()
        fields.finish("in_channels", "sample_size", "force_upcast", "torch_dtype", "dtype")
        return config

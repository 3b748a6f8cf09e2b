"""The configurations of FLUX.2's own components, as diffusers writes them.

An unsupported value is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.model.flow.config import AutoencoderConfig
from clowder_aimage.model.flow.time_embedding import FREQUENCIES
from clowder_aimage.model.rope_config import MIN_THETA
from clowder_aimage.tensor.config_fields import MAX_LAYERS, MAX_SIZE, ConfigFields

# Cells of the autoencoder on each side of a latent
PATCH = 2
# Of positions: picture, row, column, word
AXES = 4


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """``Flux2Transformer2DModel`` without guidance embeddings. Sizes are in channels."""

    in_channels: int
    num_layers: int
    num_single_layers: int
    head_dim: int
    heads: int
    joint_attention_dim: int
    mlp_ratio: float
    axes_dims: tuple[int, ...]
    rope_theta: float
    eps: float

    @property
    def dim(self) -> int:
        """Return the channels of a token."""
        return self.heads * self.head_dim

    @property
    def ffn_dim(self) -> int:
        """Return the hidden channels of the feed-forward networks."""
        return int(self.dim * self.mlp_ratio)

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> TransformerConfig:
        """Read ``transformer/config.json``.

        Raises:
            ModelError: A field is malformed or unsupported.
        """
        fields = ConfigFields(name, values)
        fields.check_value("patch_size", 1)
        fields.check_value("timestep_guidance_channels", FREQUENCIES)
        if fields.get_boolean("guidance_embeds", True):
            raise fields.refuse("guidance_embeds", "only FLUX.2 [klein] is supported, without them")
        channels = fields.get_integer("in_channels", 128, maximum=4096)
        fields.check_value("out_channels", channels)
        config = cls(
            in_channels=channels,
            num_layers=fields.get_integer("num_layers", 8, maximum=MAX_LAYERS),
            num_single_layers=fields.get_integer("num_single_layers", 48, maximum=MAX_LAYERS),
            head_dim=fields.get_integer("attention_head_dim", 128, maximum=4096),
            heads=fields.get_integer("num_attention_heads", 48, maximum=4096),
            joint_attention_dim=fields.get_integer("joint_attention_dim", 15360),
            mlp_ratio=fields.get_positive("mlp_ratio", 3.0, maximum=1024),
            axes_dims=fields.get_integers("axes_dims_rope", (32, 32, 32, 32)),
            rope_theta=fields.get_number("rope_theta", 2000, minimum=MIN_THETA),
            eps=fields.get_positive("eps", 1e-6, maximum=1.0),
        )
        fields.accept_quantization()
        fields.finish("pooled_projection_dim", "torch_dtype", "dtype")
        axes = config.axes_dims
        if len(axes) != AXES or sum(axes) != config.head_dim or any(dim % 2 for dim in axes):
            raise fields.refuse(
                "axes_dims_rope", f"must be {AXES} even numbers that add up to {config.head_dim}"
            )
        if not 1 <= config.ffn_dim <= MAX_SIZE:
            raise fields.refuse("mlp_ratio", f"times {config.dim} is not from 1 to {MAX_SIZE}")
        return config


@dataclass(frozen=True, slots=True)
class VaeConfig(AutoencoderConfig):
    """``AutoencoderKLFlux2``."""

    batch_norm_eps: float

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> VaeConfig:
        """Read ``vae/config.json``.

        Raises:
            ModelError: A field is malformed or unsupported.
        """
        fields = ConfigFields(name, values)
        fields.check_value("patch_size", [PATCH, PATCH])
        arguments = cls.read(fields, (128, 256, 512, 512), 2, 32)
        # Encoder and decoder may differ in the format, but share a configuration here
        fields.check_value("decoder_block_out_channels", list(arguments["block_out_channels"]))
        epsilon = fields.get_positive("batch_norm_eps", 1e-4, maximum=1.0)
        config = cls(**arguments, batch_norm_eps=epsilon)
        cls.finish(fields, "batch_norm_momentum")
        return config


def rename_tensor(name: str) -> str:
    """Return the name of the parameter for a tensor of diffusers' transformer."""
    name = name.replace("time_guidance_embed.timestep_embedder.linear_", "time_linear_")
    return name.replace(".to_out.0.", ".to_out.").replace(".linear.", ".")

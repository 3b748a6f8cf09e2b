"""The configurations of Z-Image's own components, as diffusers writes them.

An unsupported value is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.flow.config import AutoencoderConfig
from clowder_aimage.model.flow.pixel_position import place_pixels
from clowder_aimage.model.rope_config import MIN_THETA
from clowder_aimage.tensor.config_fields import MAX_LAYERS, ConfigFields

_MAX_SCALE = 1e6
# The patch size of ZImagePipeline
PATCH = 2
# Text and picture are each padded to a multiple of so many tokens
MULTIPLE = 32
# Hidden channels of the embedding of a time
TIME_HIDDEN = 1024
# Of the norms of queries and keys, regardless of norm_eps, as in the reference
QK_EPS = 1e-5
# Parts of diffusers' names, and the names of parameters
_NAMES = {
    f"all_x_embedder.{PATCH}-1.": "x_embedder.",
    f"all_final_layer.{PATCH}-1.": "final_layer.",
    "final_layer.adaLN_modulation.1.": "final_layer.adaLN_modulation.",
    "adaLN_modulation.0.": "adaLN_modulation.",
    "cap_embedder.0.": "cap_norm.",
    "cap_embedder.1.": "cap_linear.",
    "t_embedder.mlp.0.": "t_embedder.linear1.",
    "t_embedder.mlp.2.": "t_embedder.linear2.",
    "attention.to_out.0.": "attention.to_out.",
}

# Caption, row and column of each token
Positions = npt.NDArray[np.int64]


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
        fields.check_value("all_patch_size", [PATCH])
        fields.check_value("all_f_patch_size", [1])
        config = cls(
            in_channels=fields.get_integer("in_channels", 16, maximum=4096),
            dim=fields.get_integer("dim", 3840),
            n_layers=fields.get_integer("n_layers", 30, maximum=MAX_LAYERS),
            n_refiner_layers=fields.get_integer("n_refiner_layers", 2, maximum=MAX_LAYERS),
            n_heads=fields.get_integer("n_heads", 30),
            norm_eps=fields.get_positive("norm_eps", 1e-5, maximum=1.0),
            qk_norm=fields.get_boolean("qk_norm", True),
            cap_feat_dim=fields.get_integer("cap_feat_dim", 2560),
            rope_theta=fields.get_number("rope_theta", 256.0, minimum=MIN_THETA),
            t_scale=fields.get_number("t_scale", 1000.0, minimum=-_MAX_SCALE, maximum=_MAX_SCALE),
            axes_dims=fields.get_integers("axes_dims", (32, 48, 48)),
            axes_lens=fields.get_integers("axes_lens", (1024, 512, 512)),
        )
        fields.accept_quantization()
        # Fields without a meaning for these networks; all others must have been read
        fields.finish("n_kv_heads", "siglip_feat_dim", "torch_dtype", "dtype")
        if len(config.axes_dims) != 3 or len(config.axes_lens) != 3:
            raise fields.refuse("axes_dims", "Z-Image has three axes: caption, height, width")
        if sum(config.axes_dims) != config.head_dim or any(d % 2 for d in config.axes_dims):
            raise fields.refuse(
                "axes_dims", f"must be even and add up to dim / n_heads = {config.head_dim}"
            )
        return config


@dataclass(frozen=True, slots=True)
class VaeConfig(AutoencoderConfig):
    """``AutoencoderKL``."""

    scaling_factor: float
    shift_factor: float

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> VaeConfig:
        """Read ``vae/config.json``.

        ``shift_factor`` is required: the reference cannot decode without one.

        Raises:
            ModelError: A field is missing, malformed or unsupported.
        """
        fields = ConfigFields(name, values)
        for key in ("latents_mean", "latents_std"):
            if fields.get_raw(key) is not None:
                raise fields.refuse(key, "Z-Image scales latents by one factor, not by channel")
        config = cls(
            **cls.read(fields),
            scaling_factor=fields.get_number("scaling_factor", 0.18215, minimum=1e-6, maximum=1e6),
            shift_factor=fields.get_number("shift_factor", minimum=-_MAX_SCALE, maximum=_MAX_SCALE),
        )
        cls.finish(fields)
        return config


def pad_length(length: int) -> int:
    """Return the length rounded up to a multiple of 32."""
    return -(-length // MULTIPLE) * MULTIPLE


def rename_tensor(name: str) -> str:
    """Return the name of the parameter for a tensor of diffusers."""
    for fragment, parameter in _NAMES.items():
        name = name.replace(fragment, parameter)
    return name


def place_caption(length: int) -> Positions:
    """Return the positions of a padded caption's tokens: they count from 1."""
    positions = np.zeros((length, 3), dtype=np.int64)
    positions[:, 0] = np.arange(1, length + 1)
    return positions


def place_image(rows: int, columns: int, caption: int) -> Positions:
    """Return the positions of padded image tokens at (caption + 1, row, column), pads at zero.

    caption: the length of the padded caption, which the picture follows as one position.
    """
    positions = np.zeros((pad_length(rows * columns), 3), dtype=np.int64)
    tokens = positions[: rows * columns]
    tokens[:, 0] = caption + 1
    place_pixels(tokens, rows, columns)
    return positions

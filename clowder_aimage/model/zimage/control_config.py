"""A control network of Z-Image: its configuration and its input.

Reference: diffusers 0.42, models/controlnets/controlnet_z_image.py; weights: alibaba-pai's
Fun-Controlnet-Union 1.0 to 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clowder_aimage.formats import controlnet
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.model.zimage.config import PATCH, TransformerConfig
from clowder_aimage.tensor.config_fields import ConfigFields

LAYERS, REFINER, PLAIN = "control_layers", "control_noise_refiner", ""
_BEFORE = f"{REFINER}.0.before_proj.weight"


@dataclass(frozen=True, slots=True)
class ControlNetConfig:
    """``ZImageControlNetModel``.

    in_channels: of its input. places: the layers of the transformer that hints are added after;
    refiner_places: those of its noise refiner. refiner: the source of hints for the noise refiner,
    LAYERS or REFINER; PLAIN for a refiner of blocks without hints. block: the transformer's
    configuration, for the blocks.
    """

    in_channels: int
    places: tuple[int, ...]
    refiner_places: tuple[int, ...]
    refiner: str
    block: TransformerConfig

    @property
    def has_mask(self) -> bool:
        """Return True if it has inputs for a mask and a masked picture."""
        return self.in_channels == 2 * self.block.in_channels + 1

    @property
    def hint_width(self) -> int:
        """Return the number of values per token: of all hints and of a layer's input."""
        return (len(self.places) + 1) * self.block.dim

    @classmethod
    def parse(
        cls, name: str, values: Mapping[str, Any], base: TransformerConfig
    ) -> ControlNetConfig:
        """Read its ``config.json``. Raises ModelError: a field is malformed or unsupported."""
        fields = ConfigFields(name, values)
        fields.check_value("all_patch_size", [PATCH])
        fields.check_value("all_f_patch_size", [1])
        fields.check_value("dim", base.dim)
        fields.check_value("n_heads", base.n_heads)
        fields.check_value("n_refiner_layers", base.n_refiner_layers)
        refiner = fields.get_text("add_control_noise_refiner", PLAIN)
        if refiner not in (LAYERS, REFINER, PLAIN):
            raise fields.refuse("add_control_noise_refiner", f"expected {LAYERS} or {REFINER}")
        block = replace(
            base,
            norm_eps=fields.get_positive("norm_eps", 1e-5, maximum=1.0),
            qk_norm=fields.get_boolean("qk_norm", True),
        )
        places = _parse_places(fields, "control_layers_places", base.n_layers)
        within = _parse_places(fields, "control_refiner_layers_places", base.n_refiner_layers)
        channels = fields.get_integer("control_in_dim", maximum=4096)
        fields.finish("n_kv_heads", "torch_dtype", "dtype")
        # The reference asserts it
        if not places or places[0]:
            raise fields.refuse("control_layers_places", "must begin with 0")
        if len(within) > (len(places) if refiner == LAYERS else base.n_refiner_layers):
            raise fields.refuse("control_refiner_layers_places", "has more places than hints")
        return cls(channels, places, within if refiner else (), refiner, block)

    @classmethod
    def derive(cls, weights: ModelWeights, base: TransformerConfig) -> ControlNetConfig:
        """Return the configuration of weights without one, by their names and shapes.

        Hints are evenly spaced, as in all published files. Source: diffusers,
        loaders/single_file_utils.py.
        """
        names = set(weights)
        count = controlnet.count_layers(names)
        channels = weights.get_shape(controlnet.EMBEDDER)[1] // PATCH**2
        places = tuple(index * base.n_layers // count for index in range(count))
        # In files of 2.0 the refiner's first block has no projection, or one of zeros: the layers
        # make its hints, and the refiner is unused
        if _BEFORE in names and np.any(weights.read_numpy(_BEFORE)):
            refiner = REFINER
        else:
            refiner = PLAIN if channels == base.in_channels else LAYERS
        hints = min(count, base.n_refiner_layers) if refiner else 0
        norm = f"{LAYERS}.0.attention.norm_q.weight"
        block = replace(base, norm_eps=1e-5, qk_norm=norm in names)
        return cls(channels, places, tuple(range(hints)), refiner, block)


def _parse_places(fields: ConfigFields, key: str, count: int) -> tuple[int, ...]:
    value = fields.get_raw(key, [])
    if not isinstance(value, list) or not all(type(index) is int for index in value):
        raise fields.refuse(key, "must be a list of whole numbers")
    if value != sorted(set(value)) or not all(0 <= index < count for index in value):
        raise fields.refuse(key, f"must be increasing and below {count}")
    return tuple(value)


def to_input(
    config: ControlNetConfig, control: Floats, painted: tuple[Floats, Floats] | None
) -> Floats:
    """Return the input of a network: (in_channels, height, width).

    control: scaled latents of the picture, (channels, height, width). painted: the cells to paint
    (1, height, width), and scaled latents of the original picture; used if the network has a mask.
    """
    parts = [control]
    if painted is not None and config.has_mask:
        # The network's mask is 1 for cells to keep, that of a request 1 for cells to paint
        parts += [1 - painted[0], painted[1]]
    # Unused inputs are zeros, as in diffusers
    missing = config.in_channels - sum(channels.shape[0] for channels in parts)
    return np.concatenate([*parts, np.zeros((missing, *control.shape[1:]), np.float32)])


def read_control_config(weights: ModelWeights, base: TransformerConfig) -> ControlNetConfig:
    """Return the configuration of weights, stated or derived. Raises ModelError."""
    if weights.config:
        return ControlNetConfig.parse("config.json", weights.config, base)
    return ControlNetConfig.derive(weights, base)

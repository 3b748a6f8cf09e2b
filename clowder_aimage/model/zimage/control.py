"""Z-Image's control network: hints for the layers of the transformer, from a picture.

Its layers see the tokens of the picture beside those of the latents, and each adds a hint after one
layer of the transformer, whose embedders and refiners it uses. Reference: diffusers 0.42,
models/controlnets/controlnet_z_image.py; weights: alibaba-pai's Fun-Controlnet-Union 1.0 to 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import controlnet
from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.rope import Table
from clowder_aimage.model.memory_budget import OffloadedModule
from clowder_aimage.model.operation import Linear
from clowder_aimage.model.pipeline import StoredControlNet
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.model.zimage.config import PATCH, TransformerConfig
from clowder_aimage.model.zimage.transformer import (
    Block,
    Hints,
    Transformer,
    fill,
    to_patches,
)
from clowder_aimage.tensor.config_fields import ConfigFields

LAYERS, REFINER, PLAIN = "control_layers", "control_noise_refiner", ""
_BEFORE = f"{REFINER}.0.before_proj.weight"


@dataclass(frozen=True, slots=True)
class ControlNetConfig:
    """``ZImageControlNetModel``.

    in_channels: of its input. places: the layers of the transformer that hints are added after;
    refiner_places: those of its noise refiner. refiner: what makes hints for the noise refiner,
    LAYERS or REFINER; PLAIN if nothing does, and the refiner has blocks without hints. block: the
    transformer's configuration, for the blocks.
    """

    in_channels: int
    places: tuple[int, ...]
    refiner_places: tuple[int, ...]
    refiner: str
    block: TransformerConfig

    @property
    def has_mask(self) -> bool:
        """Return whether it has inputs for a mask and a masked picture."""
        return self.in_channels == 2 * self.block.in_channels + 1

    @classmethod
    def parse(
        cls, name: str, values: Mapping[str, Any], base: TransformerConfig
    ) -> ControlNetConfig:
        """Read its ``config.json``. Raises ModelError: a field is malformed or unsupported."""
        fields = ConfigFields(name, values)
        fields.only("all_patch_size", [PATCH])
        fields.only("all_f_patch_size", [1])
        fields.only("dim", base.dim)
        fields.only("n_heads", base.n_heads)
        fields.only("n_refiner_layers", base.n_refiner_layers)
        refiner = fields.text("add_control_noise_refiner", PLAIN)
        if refiner not in (LAYERS, REFINER, PLAIN):
            raise fields.refuse("add_control_noise_refiner", f"expected {LAYERS} or {REFINER}")
        block = replace(
            base,
            norm_eps=fields.positive("norm_eps", 1e-5, maximum=1.0),
            qk_norm=fields.boolean("qk_norm", True),
        )
        places = _places(fields, "control_layers_places", base.n_layers)
        within = _places(fields, "control_refiner_layers_places", base.n_refiner_layers)
        channels = fields.integer("control_in_dim", maximum=4096)
        fields.finish("n_kv_heads", "torch_dtype", "dtype")
        if not places or places[0]:
            raise fields.refuse("control_layers_places", "must begin with 0")
        if len(within) > (len(places) if refiner == LAYERS else base.n_refiner_layers):
            raise fields.refuse("control_refiner_layers_places", "has more places than hints")
        return cls(channels, places, within if refiner else (), refiner, block)

    @classmethod
    def derive(cls, weights: ModelWeights, base: TransformerConfig) -> ControlNetConfig:
        """Return the configuration of weights without one, by their names and shapes.

        Hints are evenly spaced, as in all published files. In files of 2.0 the refiner's first
        block has no projection, or one of zeros, and the layers make its hints; the refiner is not
        used then. Source: diffusers, loaders/single_file_utils.py.
        """
        names = set(weights)
        count = controlnet.count_layers(names)
        channels = weights.shape(controlnet.EMBEDDER)[1] // PATCH**2
        places = tuple(index * base.n_layers // count for index in range(count))
        if _BEFORE in names and np.any(weights.numpy(_BEFORE)):
            refiner = REFINER
        else:
            refiner = PLAIN if channels == base.in_channels else LAYERS
        hints = min(count, base.n_refiner_layers) if refiner else 0
        norm = f"{LAYERS}.0.attention.norm_q.weight"
        block = replace(base, norm_eps=1e-5, qk_norm=norm in names)
        return cls(channels, places, tuple(range(hints)), refiner, block)


def _places(fields: ConfigFields, key: str, count: int) -> tuple[int, ...]:
    value = fields.raw(key, [])
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise fields.refuse(key, "must be a list of whole numbers")
    if value != sorted(set(value)) or not all(0 <= one < count for one in value):
        raise fields.refuse(key, f"must be increasing and below {count}")
    return tuple(value)


class ControlBlock(Block):
    """A block that sees the tokens of the latents if it is the first, and makes a hint."""

    def __init__(self, config: TransformerConfig, *, is_first: bool) -> None:
        super().__init__(config, modulated=True)
        if is_first:
            self.before_proj = Linear(config.dim, config.dim)
        self.after_proj = Linear(config.dim, config.dim)


class ControlNet(Network):
    """The network from a picture, and the arguments of the transformer, to its hints."""

    def __init__(self, config: ControlNetConfig) -> None:
        super().__init__()
        self.config, block = config, config.block
        self.control_x_embedder = Linear(PATCH * PATCH * config.in_channels, block.dim)
        self.control_layers = _control_blocks(block, len(config.places))
        refiners = block.n_refiner_layers
        if config.refiner == REFINER:
            self.control_noise_refiner: Sequence[Block] = _control_blocks(block, refiners)
        elif config.refiner == PLAIN:
            plain = [Block(block, modulated=True) for _ in range(refiners)]
            self.control_noise_refiner = plain

    def __call__(
        self,
        transformer: Transformer,
        latents: mx.array,
        time: float,
        caption: Caption,
        cells: mx.array,
        strength: float,
    ) -> Hints:
        """Return the hints of a forward pass of the transformer with the same arguments.

        cells: the input, (in_channels, height, width) in latent cells. strength: a factor of all
        hints.
        """
        image = transformer.embed(latents, time, caption)
        context = fill(self.control_x_embedder(to_patches(cells)), transformer.x_pad_token)
        within: Hints = {}
        if self.config.refiner == PLAIN:
            for block in self.control_noise_refiner:
                context = block(context, image.rope, image.time)
        else:
            blocks = self[self.config.refiner]
            context, hints = _run(blocks, context, image.tokens, image.rope, image.time)
            places = self.config.refiner_places
            within = {place: strength * hints[index] for index, place in enumerate(places)}
        refined = transformer.refine(image, within)
        tokens, context = (
            mx.concatenate([one, caption.tokens], axis=1) for one in (refined, context)
        )
        rope = image.with_caption(caption)
        _, hints = _run(self.control_layers, context, tokens, rope, image.time)
        return {place: strength * hints[index] for index, place in enumerate(self.config.places)}

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor."""
        return Transformer.sanitize(name)

    def skip(self, name: str) -> bool:
        """Return True for a refiner that is not used, which files of 2.0 have."""
        return self.config.refiner == LAYERS and name.startswith(f"{REFINER}.")


def _control_blocks(config: TransformerConfig, count: int) -> list[ControlBlock]:
    return [ControlBlock(config, is_first=not index) for index in range(count)]


def _run(
    blocks: Sequence[ControlBlock], context: mx.array, x: mx.array, rope: Table, time: mx.array
) -> tuple[mx.array, list[mx.array]]:
    """Return the context after all blocks, and the hint of each; ``x`` is added before."""
    context, hints = blocks[0].before_proj(context) + x, []
    for block in blocks:
        context = block(context, rope, time)
        hints.append(block.after_proj(context))
    return context, hints


ControlModule = OffloadedModule[ControlNet, ControlNetConfig]


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """The control of a generation: its network, the network's input, and the factor of hints."""

    network: Callable[[], ControlNet]  # which may have been released since the last step
    cells: mx.array
    strength: float

    def hints(
        self, transformer: Transformer, latents: mx.array, time: float, caption: Caption
    ) -> Hints:
        """Return the hints of a forward pass of the transformer."""
        cells = self.cells.astype(latents.dtype)
        return self.network()(transformer, latents, time, caption, cells, self.strength)


def to_input(
    config: ControlNetConfig, control: mx.array, painted: tuple[mx.array, mx.array] | None
) -> mx.array:
    """Return the input of a network: (in_channels, height, width).

    control: scaled latents of the picture, (channels, height, width). painted: the cells to paint
    (1, height, width), and scaled latents of the picture that is kept; used if there are inputs.
    """
    parts = [control]
    if painted is not None and config.has_mask:
        parts += [1 - painted[0], painted[1]]
    missing = config.in_channels - sum(part.shape[0] for part in parts)
    return mx.concatenate([*parts, mx.zeros((missing, *control.shape[1:]))])


def own_controlnet(files: BlobFiles, model: AImage) -> StoredControlNet | None:
    """Return the control network that is packed with a model, or None."""
    component = controlnet.COMPONENT
    if not controlnet.is_packed_with(model):
        return None
    return StoredControlNet(files, model, component, component)


def open_controlnet(
    stored: StoredControlNet,
    base: TransformerConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: mx.Dtype,
    keep_quantized: bool | None,
) -> ControlModule:
    """Check a control network against a model with these shapes of tensors, by ``component/name``.

    Raises:
        FormatError: It is of another base, damaged, or has an unsupported configuration.
        ModelError: It has no tensors.
    """
    weights = ModelWeights.open(stored.files, stored.aimage, stored.component, has_config=False)
    what = f"the ControlNet {stored.name}"
    controlnet.check_fit(weights.shapes(), shapes, what, "the model")
    how: dict[str, Any] = {"dtype": dtype, "keep_quantized": keep_quantized}
    try:
        if weights.config:
            config = ControlNetConfig.parse("config.json", weights.config, base)
        else:
            config = ControlNetConfig.derive(weights, base)
        unloaded = ControlNet(config)  # its arrays are never computed
        size, _ = weights.check(unloaded, skip=unloaded.skip, **how)
    except ModelError as error:
        message = f"{what} does not fit the model: {error.message}"
        raise FormatError(message, hint=error.hint) from None

    def load() -> ControlNet:
        network = ControlNet(config)
        weights.apply(network, skip=network.skip, **how)
        return network

    return OffloadedModule(config, size, load)

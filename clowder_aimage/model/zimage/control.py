"""Z-Image's control network: hints for the layers of the transformer, from a picture.

Its layers see the tokens of the picture beside those of the latents, and each adds a hint after one
layer of the transformer, whose embedders and refiners it uses. Reference: diffusers 0.42,
models/controlnets/controlnet_z_image.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.compute.array_block import Array, to_fastest
from clowder_aimage.model.compute.operation import Linear, get_library
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.rope import Table
from clowder_aimage.model.zimage.config import PATCH, TransformerConfig
from clowder_aimage.model.zimage.control_config import LAYERS, PLAIN, REFINER, ControlNetConfig
from clowder_aimage.model.zimage.transformer import (
    Block,
    Hints,
    Transformer,
    fill,
    to_patches,
)


class ControlBlock(Block):
    """A block that returns a hint; the first block also has the tokens of the latents as input."""

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
        control_tokens = fill(self.control_x_embedder(to_patches(cells)), transformer.x_pad_token)
        context = to_fastest(control_tokens)
        refiner_hints: Hints = {}
        # Version 1.0 refines the control alone, without hints for the transformer's refiner
        if self.config.refiner == PLAIN:
            for block in self.control_noise_refiner:
                context = block(context, image.rope, image.time)
        else:
            blocks = self[self.config.refiner]
            context, hints = _run(blocks, context, image.tokens, image.rope, image.time)
            places = self.config.refiner_places
            refiner_hints = {layer: strength * hints[index] for index, layer in enumerate(places)}
        # Unlike in the transformer's own pass, the refiner has hints here
        refined = transformer.refine(image, refiner_hints)
        words = to_fastest(caption.tokens)
        tokens, context = (
            get_library(words).concatenate([sequence, words], axis=1)
            for sequence in (refined, context)
        )
        rope = image.with_caption(caption)
        _, hints = _run(self.control_layers, context, tokens, rope, image.time)
        return {layer: strength * hints[index] for index, layer in enumerate(self.config.places)}

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor."""
        return Transformer.sanitize(name)

    def skip(self, name: str) -> bool:
        """Return True for the unused refiner of 2.0 files."""
        return self.config.refiner == LAYERS and name.startswith(f"{REFINER}.")


def _control_blocks(config: TransformerConfig, count: int) -> list[ControlBlock]:
    return [ControlBlock(config, is_first=not index) for index in range(count)]


def _run(
    blocks: Sequence[ControlBlock], context: Array, x: Array, rope: Table, time: Array
) -> tuple[Array, list[Array]]:
    """Return the context after all blocks, and the hint of each; ``x`` is added at the start."""
    context, hints = blocks[0].before_proj(context) + x, []
    for block in blocks:
        context = block(context, rope, time)
        hints.append(block.after_proj(context))
    return context, hints

"""Z-Image's control network on PyTorch: hints for the layers of the transformer, from a picture.

Reference: diffusers, models/controlnets/controlnet_z_image.py.
"""

from __future__ import annotations

import torch

from clowder_aimage.model.torch.attention import Attention
from clowder_aimage.model.torch.compiler import Run
from clowder_aimage.model.torch.operation import Linear, Table
from clowder_aimage.model.torch.zimage.transformer import (
    Block,
    Hints,
    StepInputs,
    Transformer,
    fill,
    run_blocks,
)
from clowder_aimage.model.zimage.config import PATCH, TransformerConfig
from clowder_aimage.model.zimage.control_config import PLAIN, REFINER, ControlNetConfig


class ControlBlock(Block):
    """A block that returns a hint; the first block also has the tokens of the latents as input."""

    def __init__(self, config: TransformerConfig, attention: Attention, *, is_first: bool) -> None:
        super().__init__(config, attention)
        if is_first:
            self.before_proj = Linear(config.dim, config.dim)
        self.after_proj = Linear(config.dim, config.dim)

    def forward(  # type: ignore[override]
        self, context: torch.Tensor, rope: Table, time: torch.Tensor, x: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the context after the block, and its hint; ``x`` is added before the first."""
        if x is not None:
            context = self.before_proj(context) + x
        context = super().forward(context, rope, time)
        return context, self.after_proj(context)


class ControlNet(torch.nn.Module):  # type: ignore[misc]
    """The network from a picture, and the inputs of the transformer, to its hints."""

    def __init__(self, config: ControlNetConfig, attention: Attention) -> None:
        super().__init__()
        self.config, block = config, config.block
        self.control_x_embedder = Linear(PATCH * PATCH * config.in_channels, block.dim)
        self.control_layers = _build_blocks(block, attention, len(config.places))
        refiners = block.n_refiner_layers
        if config.refiner == REFINER:
            self.control_noise_refiner = _build_blocks(block, attention, refiners)
        elif config.refiner == PLAIN:
            plain = (Block(block, attention) for _ in range(refiners))
            self.control_noise_refiner = torch.nn.ModuleList(plain)

    def forward(
        self,
        transformer: Transformer,
        inputs: StepInputs,
        control_patches: torch.Tensor,
        strength: float,
        run: Run,
        transformer_run: Run,
    ) -> Hints:
        """Return the hints of a forward pass of the transformer with the same inputs.

        control_patches: those of the picture, (pictures, count, patch * patch * in_channels).
        strength: a factor of all hints. run, transformer_run: call
        blocks of either network.
        """
        time, config = transformer.t_embedder(inputs.features), self.config
        tokens = transformer.embed(inputs.patches)
        context = fill(self.control_x_embedder(control_patches), transformer.x_pad_token)
        refiner_hints: Hints = {}
        # Version 1.0 refines the control alone, without hints for the transformer's refiner
        if config.refiner == PLAIN:
            plain = inputs.image_rope, time
            context = run_blocks(run, self.control_noise_refiner, context, plain, {})
        else:
            blocks = getattr(self, config.refiner)
            context, hints = _run(run, blocks, context, tokens, (inputs.image_rope, time))
            places = config.refiner_places
            refiner_hints = {layer: strength * hints[index] for index, layer in enumerate(places)}
        # Unlike in the transformer's own pass, the refiner has hints here
        conditions = inputs.image_rope, time, refiner_hints
        refined = transformer.refine(tokens, *conditions, transformer_run)
        joint_tokens, context = (
            torch.cat((sequence, inputs.caption), dim=1) for sequence in (refined, context)
        )
        _, hints = _run(run, self.control_layers, context, joint_tokens, (inputs.rope, time))
        return {layer: strength * hints[index] for index, layer in enumerate(config.places)}


def _build_blocks(
    config: TransformerConfig, attention: Attention, count: int
) -> torch.nn.ModuleList:
    blocks = (ControlBlock(config, attention, is_first=not index) for index in range(count))
    return torch.nn.ModuleList(blocks)


def _run(
    run: Run,
    blocks: torch.nn.ModuleList,
    context: torch.Tensor,
    x: torch.Tensor,
    conditions: tuple[Table, torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the context after all blocks, and the hint of each; ``x`` is added at the start."""
    hints = []
    for index, block in enumerate(blocks):
        context, hint = run(block, context, *conditions, None if index else x)
        hints.append(hint)
    return context, hints

"""Z-Image's single-stream diffusion transformer on PyTorch, for pictures of one size.

Image and caption tokens are refined separately, then processed by the same blocks as one sequence,
image first. Reference: diffusers, models/transformers/transformer_z_image.py (arXiv 2511.22699).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from clowder_aimage.model.flow.time_embedding import FREQUENCIES
from clowder_aimage.model.torch.attention import Attention
from clowder_aimage.model.torch.compiler import Run, call_block
from clowder_aimage.model.torch.operation import (
    Linear,
    LinearGroup,
    RMSNorm,
    Table,
    build_parameter,
    normalize,
    rotate_pairs,
    stack_layers,
    swiglu,
)
from clowder_aimage.model.torch.step_cache import TorchStepCache
from clowder_aimage.model.zimage.config import (
    PATCH,
    QK_EPS,
    TIME_HIDDEN,
    TransformerConfig,
    pad_length,
)

# Tensors (pictures, length, dim) that are added after layers, by the index of the layer
Hints = Mapping[int, torch.Tensor]


class ImageAttention(torch.nn.Module):  # type: ignore[misc]
    """Full attention with normed queries and keys and rotary positions on three axes."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = config.n_heads, attention
        width = config.n_heads * config.head_dim
        self.to_q, self.to_k, self.to_v = (Linear(config.dim, width, bias=False) for _ in range(3))
        self.qkv = LinearGroup(self.to_q, self.to_k, self.to_v)
        self.to_out = Linear(width, config.dim, bias=False)
        self.has_norms = config.qk_norm
        if config.qk_norm:
            self.norm_q, self.norm_k = (RMSNorm(config.head_dim, QK_EPS) for _ in range(2))

    def forward(
        self, x: torch.Tensor, rope: Table, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the layer to x: (pictures, length, dim); returns the same shape.

        mask: True for the tokens that are seen, (pictures, 1, 1, length).
        """
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x))
        if self.has_norms:
            queries, keys = self.norm_q(queries), self.norm_k(keys)
        queries, keys = rotate_pairs(queries, rope), rotate_pairs(keys, rope)
        masks = () if mask is None else (mask,)
        mixed: torch.Tensor = self.attention(queries, keys, values, *masks).flatten(2)
        y: torch.Tensor = self.to_out(mixed)
        return y


class FeedForward(torch.nn.Module):  # type: ignore[misc]
    """SwiGLU feed-forward network."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (Linear(dim, hidden, bias=False) for _ in range(2))
        self.w13 = LinearGroup(self.w1, self.w3)
        self.w2 = Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(swiglu(*self.w13(x)))
        return y


class Block(torch.nn.Module):  # type: ignore[misc]
    """A transformer block with norms before and after; the time scales and gates it."""

    def __init__(
        self, config: TransformerConfig, attention: Attention, *, modulated: bool = True
    ) -> None:
        super().__init__()
        self.attention = ImageAttention(config, attention)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2 = (
            RMSNorm(config.dim, config.norm_eps) for _ in range(4)
        )
        if modulated:
            self.adaLN_modulation = Linear(config.modulation_dim, 4 * config.dim)

    def forward(
        self,
        x: torch.Tensor,
        rope: Table,
        time: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the block to x: (pictures, length, dim).

        time: (pictures, 1, modulation_dim), if modulated. mask: as of the attention.
        """
        if time is None:
            x = x + self.attention_norm2(self.attention(self.attention_norm1(x), rope))
            plain: torch.Tensor = x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))
            return plain
        modulation = self.adaLN_modulation(time).chunk(4, dim=-1)
        attention_scale, attention_gate, ffn_scale, ffn_gate = modulation
        mixed = self.attention(self.attention_norm1(x) * (1 + attention_scale), rope, mask)
        x = x + attention_gate.tanh() * self.attention_norm2(mixed)
        changed = self.feed_forward(self.ffn_norm1(x) * (1 + ffn_scale))
        result: torch.Tensor = x + ffn_gate.tanh() * self.ffn_norm2(changed)
        return result


class FinalLayer(torch.nn.Module):  # type: ignore[misc]
    """A norm scaled by the time, then the projection to patches."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear = Linear(config.dim, PATCH * PATCH * config.in_channels)
        self.adaLN_modulation = Linear(config.modulation_dim, config.dim)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Project x: (pictures, length, dim) to (pictures, length, patch * patch * channels)."""
        scale = 1 + self.adaLN_modulation(functional.silu(time))
        patches: torch.Tensor = self.linear(normalize(x, 1e-6) * scale)
        return patches


class TimestepEmbedder(torch.nn.Module):  # type: ignore[misc]
    """Features of a time, through a small network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear1 = Linear(FREQUENCIES, TIME_HIDDEN)
        self.linear2 = Linear(TIME_HIDDEN, config.modulation_dim)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Embed features (pictures, 1, 256); returns (pictures, 1, modulation_dim)."""
        embedded: torch.Tensor = self.linear2(functional.silu(self.linear1(features)))
        return embedded


class StepInputs(NamedTuple):
    """The tensors of a forward pass, for pictures of one size.

    patches: (pictures, count, patch * patch * channels). features: those of the times, (pictures,
    1, 256). caption: refined, (pictures, length, dim). image_rope, rope: the tables of the image,
    and of image and caption. masks: that of the tokens that are there, (pictures, 1, 1, length),
    unless all are.
    """

    patches: torch.Tensor
    features: torch.Tensor
    caption: torch.Tensor
    image_rope: Table
    rope: Table
    masks: tuple[torch.Tensor, ...] = ()


class Transformer(torch.nn.Module):  # type: ignore[misc]
    """The network from latents, a time and a caption to the predicted velocity."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        self.x_embedder = Linear(PATCH * PATCH * config.in_channels, config.dim)
        self.final_layer = FinalLayer(config)
        refiners = config.n_refiner_layers
        self.noise_refiner = stack_layers(refiners, lambda: Block(config, attention))
        self.context_refiner = stack_layers(
            refiners, lambda: Block(config, attention, modulated=False)
        )
        self.t_embedder = TimestepEmbedder(config)
        self.cap_norm = RMSNorm(config.cap_feat_dim, config.norm_eps)
        self.cap_linear = Linear(config.cap_feat_dim, config.dim)
        self.x_pad_token, self.cap_pad_token = (build_parameter(1, config.dim) for _ in range(2))
        self.layers = stack_layers(config.n_layers, lambda: Block(config, attention))

    def refine_caption(self, features: torch.Tensor, rope: Table) -> torch.Tensor:
        """Embed and refine text features (1, length, cap_feat_dim); returns the padded length."""
        x = fill(self.cap_linear(self.cap_norm(features)), self.cap_pad_token)
        for block in self.context_refiner:
            x = block(x, rope)
        return x

    def embed(self, patches: torch.Tensor) -> torch.Tensor:
        """Embed patches as padded tokens (pictures, length, dim)."""
        return fill(self.x_embedder(patches), self.x_pad_token)

    def refine(
        self, tokens: torch.Tensor, rope: Table, time: torch.Tensor, hints: Hints, run: Run
    ) -> torch.Tensor:
        """Return refined image tokens; ``hints`` are added after the refiner's layers."""
        return run_blocks(run, self.noise_refiner, tokens, (rope, time), hints)

    def forward(
        self,
        inputs: StepInputs,
        hints: Callable[[], Hints] = dict,
        cache: TorchStepCache | None = None,
        run: Run = call_block,
    ) -> torch.Tensor:
        """Return the velocity from noise to picture, in the shape of the patches.

        With a ``cache``, all layers but the first may be skipped. ``hints`` returns those of a
        control network; it is not called if layers are skipped.
        """
        time = self.t_embedder(inputs.features)
        tokens = self.refine(self.embed(inputs.patches), inputs.image_rope, time, {}, run)
        sequence = torch.cat((tokens, inputs.caption), dim=1)
        conditions = inputs.rope, time, *inputs.masks

        def run_first_layer(x: torch.Tensor) -> torch.Tensor:
            return run_blocks(run, self.layers[:1], x, conditions, {})

        def run_other_layers(x: torch.Tensor) -> torch.Tensor:
            layer_hints = hints()
            x = add_hint(x, 0, layer_hints)
            return run_blocks(run, self.layers[1:], x, conditions, layer_hints, offset=1)

        if cache is None:
            sequence = run_other_layers(run_first_layer(sequence))
        else:
            sequence = cache.run(sequence, run_first_layer, run_other_layers)
        velocity: torch.Tensor = self.final_layer(sequence[:, : inputs.patches.shape[1]], time)
        return velocity


def run_blocks(
    run: Run,
    blocks: Iterable[torch.nn.Module],
    x: torch.Tensor,
    conditions: tuple[Any, ...],
    hints: Hints,
    offset: int = 0,
) -> torch.Tensor:
    """Run blocks one after another, each with the conditions; hints are added after them."""
    for index, block in enumerate(blocks, offset):
        x = add_hint(run(block, x, *conditions), index, hints)
    return x


def add_hint(x: torch.Tensor, index: int, hints: Hints) -> torch.Tensor:
    """Return x with the hint of a layer, if there is one."""
    return x + hints[index] if index in hints else x


def fill(tokens: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
    """Pad (pictures, length, dim) to a multiple of 32 tokens with the pad token."""
    pictures, length, _ = tokens.shape
    missing = pad_length(length) - length
    if not missing:
        return tokens
    return torch.cat((tokens, pad.expand(pictures, missing, -1)), dim=1)


def to_patches(latents: torch.Tensor) -> torch.Tensor:
    """Return latents (channels, height, width) as (1, patches, patch * patch * channels)."""
    channels, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = latents.reshape(channels, rows, PATCH, columns, PATCH)
    return patches.permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)


def to_latents(patches: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return patches (count, patch * patch * channels) as latents of a shape."""
    channels, height, width = shape
    rows, columns = height // PATCH, width // PATCH
    cells = patches.reshape(rows, columns, PATCH, PATCH, channels)
    return cells.permute(4, 0, 2, 1, 3).reshape(shape)

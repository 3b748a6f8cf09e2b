"""FLUX.2's diffusion transformer on PyTorch: text and picture in two streams, then in one.

Reference: diffusers, models/transformers/transformer_flux2.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn import functional

from clowder_aimage.model.flow.time_embedding import FREQUENCIES
from clowder_aimage.model.flux2.config import TransformerConfig
from clowder_aimage.model.torch.attention import Attention
from clowder_aimage.model.torch.compiler import Run
from clowder_aimage.model.torch.operation import (
    Linear,
    LinearGroup,
    RMSNorm,
    Table,
    normalize,
    rotate_pairs,
    stack_layers,
    swiglu,
)
from clowder_aimage.model.torch.step_cache import TorchStepCache

# Text and picture
Streams = tuple[torch.Tensor, torch.Tensor]


class StepInputs(NamedTuple):
    """The tensors of a forward pass, for pictures of one size.

    tokens: those of pictures, then of their references, (pictures, length, channels). features:
    those of the noise levels, (pictures, 1, 256). caption: embedded, (pictures, words, dim). rope:
    the table of caption, pictures and references.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    caption: torch.Tensor
    rope: Table


class JointAttention(torch.nn.Module):  # type: ignore[misc]
    """Attention between two streams, with normed queries and keys and rotary positions."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        dim, self.heads, self.attention = config.dim, config.heads, attention
        self.to_q, self.to_k, self.to_v = (Linear(dim, dim, bias=False) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (
            Linear(dim, dim, bias=False) for _ in range(3)
        )
        self.qkv = LinearGroup(self.to_q, self.to_k, self.to_v)
        self.add_qkv = LinearGroup(self.add_q_proj, self.add_k_proj, self.add_v_proj)
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (
            RMSNorm(config.head_dim, config.eps) for _ in range(4)
        )
        self.to_out, self.to_add_out = (Linear(dim, dim, bias=False) for _ in range(2))

    def forward(self, text: torch.Tensor, image: torch.Tensor, rope: Table) -> Streams:
        """Apply the layer to streams (pictures, length, dim); returns the same shapes."""
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(image))
        text_queries, text_keys, text_values = (
            part.unflatten(-1, (self.heads, -1)) for part in self.add_qkv(text)
        )
        queries = torch.cat((self.norm_added_q(text_queries), self.norm_q(queries)), dim=1)
        keys = torch.cat((self.norm_added_k(text_keys), self.norm_k(keys)), dim=1)
        values = torch.cat((text_values, values), dim=1)
        queries, keys = rotate_pairs(queries, rope), rotate_pairs(keys, rope)
        mixed, words = self.attention(queries, keys, values).flatten(2), text.shape[1]
        return self.to_add_out(mixed[:, :words]), self.to_out(mixed[:, words:])


class FeedForward(torch.nn.Module):  # type: ignore[misc]
    """SwiGLU feed-forward network with one projection for both inputs."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear_in = Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.linear_out = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear_out(swiglu(*self.linear_in(x).chunk(2, dim=-1)))
        return y


class DoubleBlock(torch.nn.Module):  # type: ignore[misc]
    """A block of two streams."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn = JointAttention(config, attention)
        self.ff, self.ff_context = FeedForward(config), FeedForward(config)

    def forward(
        self,
        text: torch.Tensor,
        image: torch.Tensor,
        rope: Table,
        text_modulation: torch.Tensor,
        image_modulation: torch.Tensor,
    ) -> Streams:
        """Apply the block to streams (pictures, length, dim); returns the same shapes.

        Modulations are shifts, scales and gates: (pictures, 1, 6 * dim).
        """
        shift, scale, gate, ff_shift, ff_scale, ff_gate = image_modulation.chunk(6, dim=-1)
        text_parts = text_modulation.chunk(6, dim=-1)
        mixed_text, mixed = self.attn(
            modulate(text, text_parts[1], text_parts[0], self.eps),
            modulate(image, scale, shift, self.eps),
            rope,
        )
        image = image + gate * mixed
        image = image + ff_gate * self.ff(modulate(image, ff_scale, ff_shift, self.eps))
        text = text + text_parts[2] * mixed_text
        changed = self.ff_context(modulate(text, text_parts[4], text_parts[3], self.eps))
        return text + text_parts[5] * changed, image


class ParallelAttention(torch.nn.Module):  # type: ignore[misc]
    """Attention and a SwiGLU network of the same input, with common projections."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        dim, hidden = config.dim, config.ffn_dim
        self.heads, self.attention = config.heads, attention
        self.parts = dim, dim, dim, hidden, hidden
        self.to_qkv_mlp_proj = Linear(dim, 3 * dim + 2 * hidden, bias=False)
        self.norm_q, self.norm_k = (RMSNorm(config.head_dim, config.eps) for _ in range(2))
        self.to_out = Linear(dim + hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, rope: Table) -> torch.Tensor:
        """Apply the layer to x: (pictures, length, dim); returns the same shape."""
        *projections, gate, hidden = self.to_qkv_mlp_proj(x).split(self.parts, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)) for part in projections)
        queries = rotate_pairs(self.norm_q(queries), rope)
        keys = rotate_pairs(self.norm_k(keys), rope)
        mixed = self.attention(queries, keys, values).flatten(2)
        y: torch.Tensor = self.to_out(torch.cat((mixed, swiglu(gate, hidden)), dim=-1))
        return y


class SingleBlock(torch.nn.Module):  # type: ignore[misc]
    """A block of one stream: the text, then the picture."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn = ParallelAttention(config, attention)

    def forward(self, x: torch.Tensor, rope: Table, modulation: torch.Tensor) -> torch.Tensor:
        """Apply the block to x: (pictures, length, dim); returns the same shape.

        modulation: shift, scale and gate, (pictures, 1, 3 * dim).
        """
        shift, scale, gate = modulation.chunk(3, dim=-1)
        y: torch.Tensor = x + gate * self.attn(modulate(x, scale, shift, self.eps), rope)
        return y


class Transformer(torch.nn.Module):  # type: ignore[misc]
    """The network from latents, a time and a caption to the velocity from picture to noise."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        dim, self.eps = config.dim, config.eps
        self.time_linear_1 = Linear(FREQUENCIES, dim, bias=False)
        self.time_linear_2 = Linear(dim, dim, bias=False)
        self.double_stream_modulation_img = Linear(dim, 6 * dim, bias=False)
        self.double_stream_modulation_txt = Linear(dim, 6 * dim, bias=False)
        self.single_stream_modulation = Linear(dim, 3 * dim, bias=False)
        self.x_embedder = Linear(config.in_channels, dim, bias=False)
        self.context_embedder = Linear(config.joint_attention_dim, dim, bias=False)
        self.transformer_blocks = stack_layers(
            config.num_layers, lambda: DoubleBlock(config, attention)
        )
        self.single_transformer_blocks = stack_layers(
            config.num_single_layers, lambda: SingleBlock(config, attention)
        )
        self.norm_out = Linear(dim, 2 * dim, bias=False)
        self.proj_out = Linear(dim, config.in_channels, bias=False)

    def forward(
        self, inputs: StepInputs, count: int, run: Run, cache: TorchStepCache | None = None
    ) -> torch.Tensor:
        """Return the velocity of the first ``count`` tokens, those of the pictures themselves.

        With a ``cache``, all blocks but the first may be skipped.
        """
        hidden = functional.silu(self.time_linear_1(inputs.features))
        time = functional.silu(self.time_linear_2(hidden))
        text = self.double_stream_modulation_txt(time)
        image = self.double_stream_modulation_img(time)
        single = self.single_stream_modulation(time)
        streams, words = (inputs.caption, self.x_embedder(inputs.tokens)), inputs.caption.shape[1]

        def double(blocks: Iterable[torch.nn.Module], streams: Streams) -> torch.Tensor:
            for block in blocks:
                streams = run(block, *streams, inputs.rope, text, image)
            return torch.cat(streams, dim=1)

        def run_single_blocks(x: torch.Tensor) -> torch.Tensor:
            for block in self.single_transformer_blocks:
                x = run(block, x, inputs.rope, single)
            return x

        def split(x: torch.Tensor) -> Streams:
            # Compiled code is for arrays of their own: a slice has the strides of the whole
            form = torch.contiguous_format
            return x[:, :words].clone(memory_format=form), x[:, words:].clone(memory_format=form)

        def run_first_block(x: torch.Tensor) -> torch.Tensor:
            return double(self.transformer_blocks[:1], split(x))

        def run_other_blocks(x: torch.Tensor) -> torch.Tensor:
            return run_single_blocks(double(self.transformer_blocks[1:], split(x)))

        if cache is None:
            x = run_single_blocks(double(self.transformer_blocks, streams))
        else:
            x = cache.run(torch.cat(streams, dim=1), run_first_block, run_other_blocks)
        scale, shift = self.norm_out(time).chunk(2, dim=-1)
        # Only the tokens of the picture itself: texts and references have no velocity
        changed = modulate(x[:, words : words + count], scale, shift, self.eps)
        velocity: torch.Tensor = self.proj_out(changed)
        return velocity


def modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the normalized x, scaled and shifted."""
    return normalize(x, eps) * (1 + scale) + shift

"""FLUX.2's diffusion transformer: text and picture in two streams, then in one.

In blocks of two streams, text and picture have separate projections and joint attention; blocks of
one stream compute attention and a feed-forward network at the same time. The time modulates all
blocks of a kind alike. Reference: diffusers, models/transformers/transformer_flux2.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.compute.array_block import Array, to_fastest, to_mlx
from clowder_aimage.model.compute.attention import attention
from clowder_aimage.model.compute.operation import (
    LayerNorm,
    Linear,
    RMSNorm,
    add,
    get_library,
    modulate,
    silu,
    swiglu_in_place,
)
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.rope import Table, build_axes_table, rotate_pairs
from clowder_aimage.model.flow.step_cache import StepCache
from clowder_aimage.model.flow.time_embedding import FREQUENCIES, embed_time
from clowder_aimage.model.flux2.config import TransformerConfig, rename_tensor
from clowder_aimage.model.flux2.reference_picture import (
    Positions,
    ReferenceTokens,
    build_positions,
    place_words,
    to_tokens,
)

# Shift, scale and gate of each part of a block: (1, 1, dim)
Modulation = list[Array]
# Text and picture
Streams = tuple[Array, Array]


class JointAttention(Network):
    """Attention between two streams, with normed queries and keys and rotary positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, self.heads, self.scale = config.dim, config.heads, config.head_dim**-0.5
        self.to_q, self.to_k, self.to_v = (Linear(dim, dim, bias=False) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (
            Linear(dim, dim, bias=False) for _ in range(3)
        )
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (
            RMSNorm(config.head_dim, eps=config.eps) for _ in range(4)
        )
        self.to_out, self.to_add_out = (Linear(dim, dim, bias=False) for _ in range(2))

    def __call__(self, text: Array, image: Array, rope: Table) -> Streams:
        """Apply the layer to streams (1, length, dim); returns the same shapes."""

        def split(projected: Array) -> Array:
            return projected.reshape(1, projected.shape[1], self.heads, -1)

        def join(*streams: Array) -> Array:
            return get_library(text).concatenate(streams, axis=1)

        queries = join(
            self.norm_added_q(split(self.add_q_proj(text))), self.norm_q(split(self.to_q(image)))
        )
        keys = join(
            self.norm_added_k(split(self.add_k_proj(text))), self.norm_k(split(self.to_k(image)))
        )
        values = join(split(self.add_v_proj(text)), split(self.to_v(image)))
        queries, keys = rotate_pairs([queries, keys], rope)
        mixed = attention(queries, keys, values, self.scale)
        words, length = text.shape[1], mixed.shape[1]
        mixed = mixed.reshape(1, length, -1)
        return self.to_add_out(mixed[:, :words]), self.to_out(mixed[:, words:])


class FeedForward(Network):
    """SwiGLU feed-forward network with one projection for both inputs."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear_in = Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.linear_out = Linear(config.ffn_dim, config.dim, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.linear_out(
            swiglu_in_place(*get_library(x).split(self.linear_in(x), 2, axis=-1))
        )


class DoubleBlock(Network):
    """A block of two streams."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.dim, eps=config.eps)
        self.attn = JointAttention(config)
        self.ff, self.ff_context = FeedForward(config), FeedForward(config)

    def __call__(
        self, streams: Streams, rope: Table, modulations: tuple[Modulation, Modulation]
    ) -> Streams:
        """Apply the block; ``modulations`` are of text and picture."""
        normed = [
            modulate(self.norm, x, scale, shift)
            for x, (shift, scale, *_) in zip(streams, modulations, strict=True)
        ]
        mixed = self.attn(normed[0], normed[1], rope)
        networks = self.ff_context, self.ff
        outputs = []
        for x, change, modulation, network in zip(
            streams, mixed, modulations, networks, strict=True
        ):
            _, _, gate, shift, scale, last_gate = modulation
            x = add(x, change, gate)
            outputs.append(add(x, network(modulate(self.norm, x, scale, shift)), last_gate))
        return outputs[0], outputs[1]


class ParallelAttention(Network):
    """Attention and a SwiGLU network of the same input, with common projections."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, hidden = config.dim, config.ffn_dim
        self.dim, self.heads, self.scale = dim, config.heads, config.head_dim**-0.5
        self.to_qkv_mlp_proj = Linear(dim, 3 * dim + 2 * hidden, bias=False)
        self.norm_q, self.norm_k = (RMSNorm(config.head_dim, eps=config.eps) for _ in range(2))
        self.to_out = Linear(dim + hidden, dim, bias=False)

    def __call__(self, x: Array, rope: Table) -> Array:
        """Apply the layer to x: (1, length, dim); returns the same shape."""
        _, length, dim = x.shape
        offsets, arrays = [dim, 2 * dim, 3 * dim], get_library(x)
        queries, keys, values, hidden = arrays.split(self.to_qkv_mlp_proj(x), offsets, axis=-1)
        queries, keys, values = (
            projection.reshape(1, length, self.heads, -1) for projection in (queries, keys, values)
        )
        queries, keys = rotate_pairs([self.norm_q(queries), self.norm_k(keys)], rope)
        mixed = attention(queries, keys, values, self.scale).reshape(1, length, dim)
        hidden = swiglu_in_place(*arrays.split(hidden, 2, axis=-1))
        return self.to_out(arrays.concatenate([mixed, hidden], axis=-1))


class SingleBlock(Network):
    """A block of one stream: the text, then the picture."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.dim, eps=config.eps)
        self.attn = ParallelAttention(config)

    def __call__(self, x: Array, rope: Table, modulation: Modulation) -> Array:
        """Apply the block to x: (1, length, dim); returns the same shape."""
        shift, scale, gate = modulation
        return add(x, self.attn(modulate(self.norm, x, scale, shift), rope), gate)


class Transformer(Network):
    """The network from latents, a time and a caption to the velocity from picture to noise."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, dim = config, config.dim
        self.time_linear_1 = Linear(FREQUENCIES, dim, bias=False)
        self.time_linear_2 = Linear(dim, dim, bias=False)
        self.double_stream_modulation_img = Linear(dim, 6 * dim, bias=False)
        self.double_stream_modulation_txt = Linear(dim, 6 * dim, bias=False)
        self.single_stream_modulation = Linear(dim, 3 * dim, bias=False)
        self.x_embedder = Linear(config.in_channels, dim, bias=False)
        self.context_embedder = Linear(config.joint_attention_dim, dim, bias=False)
        self.transformer_blocks = [DoubleBlock(config) for _ in range(config.num_layers)]
        self.single_transformer_blocks = [
            SingleBlock(config) for _ in range(config.num_single_layers)
        ]
        self.norm = LayerNorm(dim, eps=config.eps)
        self.norm_out = Linear(dim, 2 * dim, bias=False)
        self.proj_out = Linear(dim, config.in_channels, bias=False)

    def build_caption(self, features: mx.array) -> Caption:
        """Embed text features of shape (length, joint_attention_dim)."""
        rope = self._build_rope(place_words(len(features)))
        return Caption(self.context_embedder(features[None]), rope)

    def __call__(
        self,
        latents: mx.array,
        sigma: float,
        caption: Caption,
        references: ReferenceTokens | None = None,
        cache: StepCache | None = None,
    ) -> mx.array:
        """Run one forward pass.

        latents: (channels, height, width). sigma: 1 (noise) to 0 (picture). With a ``cache``, all
        blocks but the first may be skipped. Returns the velocity, in the shape of the latents.
        """
        channels, height, width = latents.shape
        tokens, positions = to_tokens(latents), build_positions(0, height, width)
        if references is not None:
            tokens = mx.concatenate([tokens, references.tokens])
            positions = np.concatenate([positions, references.positions])
        pairs = zip(caption.rope, self._build_rope(positions), strict=True)
        cosines, sines = (mx.concatenate(list(pair)) for pair in pairs)
        time = to_fastest(silu(self._embed_time(sigma).astype(latents.dtype)))
        x = mx.concatenate([caption.tokens, self.x_embedder(tokens[None])], axis=1)
        words = caption.tokens.shape[1]
        x = self._run(to_fastest(x), words, (cosines, sines), time, cache)
        scale, shift = get_library(x).split(self.norm_out(time)[:, None], 2, axis=-1)
        # Only the tokens of the picture itself: texts and references have no velocity
        x = modulate(self.norm, x[:, words : words + height * width], scale, shift)
        return to_mlx(self.proj_out(x)[0].T).reshape(channels, height, width)

    def _embed_time(self, sigma: float) -> Array:
        # The reference scales the noise level by 1000, in float32
        features = mx.array(embed_time(float(np.float32(sigma) * np.float32(1000))))[None]
        return self.time_linear_2(silu(self.time_linear_1(features.astype(self._dtype))))

    @property
    def _dtype(self) -> mx.Dtype:
        # Norms are never quantized: their weights have the compute type
        return self.transformer_blocks[0].attn.norm_q.weight.dtype

    def _run(
        self, x: Array, words: int, rope: Table, time: Array, cache: StepCache | None
    ) -> Array:
        """Run all blocks; the first ``words`` tokens of x are the text."""

        def compute_modulation(network: Linear, count: int) -> Modulation:
            return list(get_library(time).split(network(time)[:, None], count, axis=-1))

        text = compute_modulation(self.double_stream_modulation_txt, 6)
        image = compute_modulation(self.double_stream_modulation_img, 6)
        single = compute_modulation(self.single_stream_modulation, 3)

        def double(blocks: Sequence[DoubleBlock], x: Array) -> Array:
            streams = x[:, :words], x[:, words:]
            for block in blocks:
                streams = block(streams, rope, (text, image))
            return get_library(x).concatenate(streams, axis=1)

        def run_other_blocks(x: Array) -> Array:
            x = double(self.transformer_blocks[1:], x)
            for block in self.single_transformer_blocks:
                x = block(x, rope, single)
            return x

        def run_first_block(x: Array) -> Array:
            return double(self.transformer_blocks[:1], x)

        if cache is None:
            return run_other_blocks(run_first_block(x))
        return cache.run(x, run_first_block, run_other_blocks)

    def _build_rope(self, positions: Positions) -> Table:
        return build_axes_table(
            positions, self.config.axes_dims, self.config.rope_theta, is_exact=True
        )

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a diffusers tensor."""
        return rename_tensor(name)

    @staticmethod
    def skip(_: str) -> bool:
        """Return False: all tensors are used."""
        return False

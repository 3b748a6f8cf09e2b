"""Z-Image's single-stream diffusion transformer (S3-DiT).

Image and caption tokens are refined separately, then processed by the same blocks as one sequence,
image first. Both are padded to a multiple of 32 with learned pad tokens, which take part in
attention. Reference: diffusers, models/transformers/transformer_z_image.py (arXiv 2511.22699).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from clowder_aimage.model.zimage.config import (
    PATCH,
    QK_EPS,
    TIME_HIDDEN,
    Positions,
    TransformerConfig,
    pad_length,
    place_caption,
    place_image,
    rename_tensor,
)


class ImageAttention(Network):
    """Full attention with normed queries and keys and rotary positions on three axes."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.n_heads * config.head_dim
        self.heads, self.scale = config.n_heads, config.head_dim**-0.5
        self.to_q = Linear(config.dim, width, bias=False)
        self.to_k = Linear(config.dim, width, bias=False)
        self.to_v = Linear(config.dim, width, bias=False)
        self.to_out = Linear(width, config.dim, bias=False)
        if config.qk_norm:
            self.norm_q = RMSNorm(config.head_dim, eps=QK_EPS)
            self.norm_k = RMSNorm(config.head_dim, eps=QK_EPS)

    def __call__(self, x: Array, rope: Table) -> Array:
        """Apply the layer to x: (1, length, dim); returns the same shape."""
        batch, length, _ = x.shape
        shape = (batch, length, self.heads, -1)
        queries, keys = self.to_q(x).reshape(shape), self.to_k(x).reshape(shape)
        if "norm_q" in self:
            queries, keys = self.norm_q(queries), self.norm_k(keys)
        queries, keys = rotate_pairs([queries, keys], rope)
        mixed = attention(queries, keys, self.to_v(x).reshape(shape), self.scale)
        return self.to_out(mixed.reshape(batch, length, -1))


class FeedForward(Network):
    """SwiGLU feed-forward network."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden, bias=False)
        self.w2 = Linear(hidden, dim, bias=False)
        self.w3 = Linear(dim, hidden, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.w2(swiglu_in_place(self.w1(x), self.w3(x)))


class Block(Network):
    """A transformer block with norms before and after; the time scales and gates it."""

    def __init__(self, config: TransformerConfig, *, modulated: bool) -> None:
        super().__init__()
        self.attention = ImageAttention(config)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.attention_norm1 = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention_norm2 = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm1 = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm2 = RMSNorm(config.dim, eps=config.norm_eps)
        if modulated:
            self.adaLN_modulation = Linear(config.modulation_dim, 4 * config.dim)

    def __call__(self, x: Array, rope: Table, time: Array | None = None) -> Array:
        """Apply the block to x: (1, length, dim); time: (1, modulation_dim), if modulated."""
        if time is None:
            mixed = self.attention(self.attention_norm1(x), rope)
            x = add(x, mixed, norm=self.attention_norm2)
            return add(x, self.feed_forward(self.ffn_norm1(x)), norm=self.ffn_norm2)
        arrays = get_library(x)
        modulation = arrays.split(self.adaLN_modulation(time)[:, None], 4, axis=-1)
        attention_scale, attention_gate, ffn_scale, ffn_gate = modulation
        mixed = self.attention(modulate(self.attention_norm1, x, attention_scale), rope)
        x = add(x, mixed, arrays.tanh(attention_gate), self.attention_norm2)
        changed = self.feed_forward(modulate(self.ffn_norm1, x, ffn_scale))
        return add(x, changed, arrays.tanh(ffn_gate), self.ffn_norm2)


class FinalLayer(Network):
    """A norm scaled by the time, then the projection to patches."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_final = LayerNorm(config.dim, eps=1e-6)
        self.linear = Linear(config.dim, PATCH * PATCH * config.in_channels)
        self.adaLN_modulation = Linear(config.modulation_dim, config.dim)

    def __call__(self, x: Array, time: Array) -> Array:
        """Project x: (1, length, dim) to (1, length, patch * patch * channels)."""
        scale = self.adaLN_modulation(silu(time))[:, None]
        return self.linear(modulate(self.norm_final, x, scale))


class TimestepEmbedder(Network):
    """Cosines then sines of the scaled time, through a small network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear1 = Linear(FREQUENCIES, TIME_HIDDEN)
        self.linear2 = Linear(TIME_HIDDEN, config.modulation_dim)

    def __call__(self, time: float) -> Array:
        """Embed time, which is already scaled; returns (1, modulation_dim)."""
        # The weight may be quantized: only the bias has the compute type
        features = mx.array(embed_time(time))[None].astype(self.linear1.bias.dtype)
        return self.linear2(silu(self.linear1(features)))


# Arrays (1, length, dim) that are added after layers, by the index of the layer
Hints = Mapping[int, Array]


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """The embedded latents of a step, before they are refined.

    tokens: (1, length, dim), padded to a multiple of 32. time: (1, modulation_dim).
    """

    tokens: Array
    rope: Table
    time: Array

    def with_caption(self, caption: Caption) -> Table:
        """Return the rope of the sequence of image and caption."""
        pairs = zip(self.rope, caption.rope, strict=True)
        cosines, sines = (mx.concatenate([image, text]) for image, text in pairs)
        return cosines, sines


class Transformer(Network):
    """The network from latents, a time and a caption to the predicted velocity."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.x_embedder = Linear(PATCH * PATCH * config.in_channels, config.dim)
        self.final_layer = FinalLayer(config)
        refiners = range(config.n_refiner_layers)
        self.noise_refiner = [Block(config, modulated=True) for _ in refiners]
        self.context_refiner = [Block(config, modulated=False) for _ in refiners]
        self.t_embedder = TimestepEmbedder(config)
        self.cap_norm = RMSNorm(config.cap_feat_dim, eps=config.norm_eps)
        self.cap_linear = Linear(config.cap_feat_dim, config.dim)
        self.x_pad_token = mx.zeros((1, config.dim))
        self.cap_pad_token = mx.zeros((1, config.dim))
        self.layers = [Block(config, modulated=True) for _ in range(config.n_layers)]

    def build_caption(self, features: mx.array) -> Caption:
        """Embed and refine text features of shape (length, cap_feat_dim)."""
        tokens = fill(self.cap_linear(self.cap_norm(features)), self.cap_pad_token)
        rope, x = self._build_rope(place_caption(tokens.shape[1])), to_fastest(tokens)
        for block in self.context_refiner:
            x = block(x, rope)
        return Caption(to_mlx(x), rope)

    def __call__(
        self,
        latents: mx.array,
        time: float,
        caption: Caption,
        cache: StepCache | None = None,
        hints: Callable[[], Hints] = dict,
    ) -> mx.array:
        """Run one forward pass.

        latents: (channels, height, width) in latent cells, both even; time: 1 - sigma, 0 (noise)
        to 1 (picture). With a ``cache``, all layers but the first may be skipped. ``hints`` returns
        those of a control network, for the same arguments; it is not called if layers are skipped.
        Returns the velocity from noise to picture, in the same shape.
        """
        channels, height, width = latents.shape
        rows, columns = height // PATCH, width // PATCH
        image = self.embed(latents, time, caption)
        parts = self.refine(image, {}), to_fastest(caption.tokens)
        sequence = get_library(image.tokens).concatenate(parts, axis=1)
        rope = image.with_caption(caption)
        conditions = rope, image.time

        def run_other_layers(x: Array) -> Array:
            layer_hints = hints()
            return _run(
                self.layers[1:], _add_hint(x, 0, layer_hints), *conditions, layer_hints, offset=1
            )

        if cache is None:
            sequence = run_other_layers(self.layers[0](sequence, *conditions))
        else:
            first_layer = self.layers[0]
            sequence = cache.run(sequence, lambda x: first_layer(x, *conditions), run_other_layers)
        patches = to_mlx(self.final_layer(sequence[:, : rows * columns], image.time))
        patches = patches.reshape(rows, columns, PATCH, PATCH, channels)
        return patches.transpose(4, 0, 2, 1, 3).reshape(channels, height, width)

    def embed(self, latents: mx.array, time: float, caption: Caption) -> ImageTokens:
        """Embed latents and their time, as in a forward pass."""
        _, height, width = latents.shape
        embedded = self.t_embedder(float(np.float32(time) * np.float32(self.config.t_scale)))
        tokens = fill(self.x_embedder(to_patches(latents)), self.x_pad_token)
        positions = place_image(height // PATCH, width // PATCH, caption.tokens.shape[1])
        moment = to_fastest(embedded.astype(latents.dtype))
        return ImageTokens(to_fastest(tokens), self._build_rope(positions), moment)

    def refine(self, image: ImageTokens, hints: Hints) -> Array:
        """Return refined image tokens; ``hints`` are added after the refiner's layers."""
        return _run(self.noise_refiner, image.tokens, image.rope, image.time, hints)

    def _build_rope(self, positions: Positions) -> Table:
        return build_axes_table(positions, self.config.axes_dims, self.config.rope_theta)

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a diffusers tensor."""
        return rename_tensor(name)

    @staticmethod
    def skip(name: str) -> bool:
        """Return True for tensors of image-conditioned variants."""
        return name.startswith("siglip_")


def to_patches(latents: mx.array) -> mx.array:
    """Return latents (channels, height, width) as patches (count, patch * patch * channels)."""
    channels, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = latents.reshape(channels, rows, PATCH, columns, PATCH)
    return patches.transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)


def _run(
    blocks: Sequence[Block], x: Array, rope: Table, time: Array, hints: Hints, offset: int = 0
) -> Array:
    for index, block in enumerate(blocks, offset):
        x = _add_hint(block(x, rope, time), index, hints)
    return x


def _add_hint(x: Array, index: int, hints: Hints) -> Array:
    return x + hints[index] if index in hints else x


def fill(tokens: mx.array, pad: mx.array) -> mx.array:
    """Pad (length, dim) to (1, padded length, dim) with the pad token."""
    length, dim = tokens.shape
    missing = pad_length(length) - length
    if missing:
        fill = mx.broadcast_to(pad.astype(tokens.dtype), (missing, dim))
        tokens = mx.concatenate([tokens, fill])
    return tokens[None]

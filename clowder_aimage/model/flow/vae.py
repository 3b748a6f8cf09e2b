"""The decoder from latents to pixels, and the encoder, of ``AutoencoderKL``, channels last.

Reference: diffusers, models/autoencoders/autoencoder_kl.py and vae.py (arXiv 2112.10752).
Group norms follow PyTorch; MLX groups channels differently by default.
"""

from __future__ import annotations

from typing import Any, ClassVar

from clowder_aimage.model.backend import Conv2d, GroupNorm, Network, mx
from clowder_aimage.model.compute.attention import attention
from clowder_aimage.model.compute.convolution import convolve, convolve_strided
from clowder_aimage.model.compute.operation import Linear
from clowder_aimage.model.flow.config import AutoencoderConfig

# Of all group norms, as in the reference
EPS = 1e-6


def _build_norm(config: AutoencoderConfig, channels: int) -> GroupNorm:
    return GroupNorm(config.norm_num_groups, channels, eps=EPS, pytorch_compatible=True)


class ResnetBlock(Network):
    """Two normed convolutions with a residual connection."""

    def __init__(self, config: AutoencoderConfig, channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = _build_norm(config, channels)
        self.conv1 = Conv2d(channels, out_channels, 3, padding=1)
        self.norm2 = _build_norm(config, out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1)
        if channels != out_channels:
            self.conv_shortcut = Conv2d(channels, out_channels, 1)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the block to x: (1, height, width, channels)."""
        hidden = convolve(x, self.conv1, norm=self.norm1)
        residual = convolve(x, self.conv_shortcut) if "conv_shortcut" in self else x
        return convolve(hidden, self.conv2, norm=self.norm2, residual=residual)


class VaeAttention(Network):
    """Single-head attention between all cells, with a residual connection."""

    def __init__(self, config: AutoencoderConfig, channels: int) -> None:
        super().__init__()
        self.group_norm = _build_norm(config, channels)
        self.to_q = Linear(channels, channels)
        self.to_k = Linear(channels, channels)
        self.to_v = Linear(channels, channels)
        self.to_out = Linear(channels, channels)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the layer to x: (1, height, width, channels)."""
        batch, height, width, channels = x.shape
        # One head: attention takes (batch, length, heads, channels)
        normed = self.group_norm(x).reshape(batch, height * width, 1, channels)
        queries, keys, values = self.to_q(normed), self.to_k(normed), self.to_v(normed)
        mixed = attention(queries, keys, values, channels**-0.5)
        changed: mx.array = self.to_out(mixed)
        return x + changed.reshape(x.shape)


class MidBlock(Network):
    """A residual block, optional attention, a residual block."""

    def __init__(self, config: AutoencoderConfig, channels: int) -> None:
        super().__init__()
        self.resnets = [ResnetBlock(config, channels, channels) for _ in range(2)]
        attention = config.mid_block_add_attention
        self.attentions = [VaeAttention(config, channels)] if attention else []

    def __call__(self, x: mx.array) -> mx.array:
        before, after = self.resnets
        x = before(x)
        for layer in self.attentions:
            x = layer(x)
        return after(x)


class Upsample(Network):
    """Nearest-neighbour upsampling by 2, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        return convolve(x, self.conv, scale=2)


class UpBlock(Network):
    """Residual blocks, then upsampling, except in the last block."""

    def __init__(
        self, config: AutoencoderConfig, channels: int, out_channels: int, *, is_last: bool
    ) -> None:
        super().__init__()
        # The decoder has one residual block more than layers_per_block, as in the reference
        widths = [channels] + [out_channels] * config.layers_per_block
        self.resnets = [ResnetBlock(config, width, out_channels) for width in widths]
        self.upsamplers = [] if is_last else [Upsample(out_channels)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in [*self.resnets, *self.upsamplers]:
            x = layer(x)
        return x


class Decoder(Network):
    """(1, height, width, latent channels) to (1, scale * height, scale * width, 3)."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = config.block_out_channels[::-1]
        self.conv_in = Conv2d(config.latent_channels, widths[0], 3, padding=1)
        self.mid_block = MidBlock(config, widths[0])
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.up_blocks = [
            UpBlock(config, before, after, is_last=index == len(pairs) - 1)
            for index, (before, after) in enumerate(pairs)
        ]
        self.conv_norm_out = _build_norm(config, widths[-1])
        self.conv_out = Conv2d(widths[-1], config.out_channels, 3, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.mid_block(convolve(x, self.conv_in))
        for block in self.up_blocks:
            x = block(x)
        return convolve(x, self.conv_out, norm=self.conv_norm_out)


class Downsample(Network):
    """A convolution of every second pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, stride=2)

    def __call__(self, x: mx.array) -> mx.array:
        return convolve_strided(x, self.conv)


class DownBlock(Network):
    """Residual blocks, then downsampling, except in the last block."""

    def __init__(
        self, config: AutoencoderConfig, channels: int, out_channels: int, *, is_last: bool
    ) -> None:
        super().__init__()
        widths = [channels] + [out_channels] * (config.layers_per_block - 1)
        self.resnets = [ResnetBlock(config, width, out_channels) for width in widths]
        self.downsamplers = [] if is_last else [Downsample(out_channels)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in [*self.resnets, *self.downsamplers]:
            x = layer(x)
        return x


class Encoder(Network):
    """(1, scale * height, scale * width, 3) to (1, height, width, 2 * latent channels)."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = config.block_out_channels
        self.conv_in = Conv2d(config.out_channels, widths[0], 3, padding=1)
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.down_blocks = [
            DownBlock(config, before, after, is_last=index == len(pairs) - 1)
            for index, (before, after) in enumerate(pairs)
        ]
        self.mid_block = MidBlock(config, widths[-1])
        self.conv_norm_out = _build_norm(config, widths[-1])
        self.conv_out = Conv2d(widths[-1], 2 * config.latent_channels, 3, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        x = convolve(x, self.conv_in)
        for block in self.down_blocks:
            x = block(x)
        return convolve(self.mid_block(x), self.conv_out, norm=self.conv_norm_out)


class Autoencoder(Network):
    """Half of an autoencoder; a family adds the scale of its latents.

    ``OTHERS``: the beginnings of names of tensors that it does not use.
    """

    OTHERS: ClassVar[tuple[str, ...]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a diffusers tensor."""
        # In diffusers to_out is a list of a linear layer and dropout
        return name.replace(".to_out.0.", ".to_out.")

    @classmethod
    def skip(cls, name: str) -> bool:
        """Return True for tensors of the other half."""
        return name.startswith(cls.OTHERS)


class LatentEncoder(Autoencoder):
    """The encoder alone: only requests with a picture need it."""

    OTHERS: ClassVar[tuple[str, ...]] = ("decoder.", "post_quant_conv.")

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        if config.use_quant_conv:
            width = 2 * config.latent_channels
            self.quant_conv = Conv2d(width, width, 1)

    def encode(self, pixels: mx.array) -> tuple[mx.array, mx.array]:
        """Encode pixels (scale * height, scale * width, 3), -1 to 1.

        Returns the means and standard deviations of the latents, (channels, height, width), not
        yet scaled and shifted.
        """
        x = self.encoder(pixels[None])
        if "quant_conv" in self:
            x = self.quant_conv(x)
        # The second half of the channels is the logarithm of the variance
        means, logarithms = mx.split(x[0].transpose(2, 0, 1), 2)
        # The bounds are those of diffusers' DiagonalGaussianDistribution
        return means, mx.exp(0.5 * mx.clip(logarithms, -30, 20))


class LatentDecoder(Autoencoder):
    """The decoder; the encoder is another network."""

    OTHERS: ClassVar[tuple[str, ...]] = ("encoder.", "quant_conv.")

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config)
        if config.use_post_quant_conv:
            width = config.latent_channels
            self.post_quant_conv = Conv2d(width, width, 1)

    def to_pixels(self, cells: mx.array) -> mx.array:
        """Decode (channels, height, width), as encoded, to (scale * height, scale * width, 3).

        Pixels are about -1 to 1, not clipped; the dtype is that of the cells.
        """
        x = cells.transpose(1, 2, 0)[None]
        if "post_quant_conv" in self:
            x = self.post_quant_conv(x)
        return self.decoder(x)[0]

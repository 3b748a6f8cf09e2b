"""The decoder from latents to pixels, and the encoder, of ``AutoencoderKL`` on PyTorch.

Reference: diffusers, models/autoencoders/autoencoder_kl.py and vae.py (arXiv 2112.10752).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from clowder_aimage.model.flow.config import AutoencoderConfig
from clowder_aimage.model.rounding import COMPILED, EAGER
from clowder_aimage.model.torch.attention import attend
from clowder_aimage.model.torch.compiler import CompiledForm, Run, call_block, mark_variable
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.network import TorchNetwork
from clowder_aimage.model.torch.operation import Linear, LinearGroup, build_parameter

# Of all group norms, as in the reference
EPS = 1e-6


class Conv2d(torch.nn.Module):  # type: ignore[misc]
    """A convolution with the same padding on each side."""

    def __init__(
        self, inputs: int, outputs: int, size: int = 3, *, stride: int = 1, padding: int = 1
    ) -> None:
        super().__init__()
        self.stride, self.padding = stride, padding
        self.weight = build_parameter(outputs, inputs, size, size)
        self.bias = build_parameter(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class GroupNorm(torch.nn.Module):  # type: ignore[misc]
    """The channels of each group less their mean, over their standard deviation."""

    def __init__(self, config: AutoencoderConfig, channels: int) -> None:
        super().__init__()
        self.groups = config.norm_num_groups
        self.weight, self.bias = build_parameter(channels), build_parameter(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(x, self.groups, self.weight, self.bias, EPS)


class ResnetBlock(torch.nn.Module):  # type: ignore[misc]
    """Two normed convolutions with a residual connection."""

    def __init__(self, config: AutoencoderConfig, channels: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = GroupNorm(config, channels), Conv2d(channels, outputs)
        self.norm2, self.conv2 = GroupNorm(config, outputs), Conv2d(outputs, outputs)
        self.conv_shortcut: Conv2d | None = None
        if channels != outputs:
            self.conv_shortcut = Conv2d(channels, outputs, 1, padding=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to x: (1, channels, height, width)."""
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        residual = x if self.conv_shortcut is None else self.conv_shortcut(x)
        y: torch.Tensor = residual + hidden
        return y


class CellAttention(torch.nn.Module):  # type: ignore[misc]
    """Single-head attention between all cells, with a residual connection."""

    def __init__(self, config: AutoencoderConfig, channels: int) -> None:
        super().__init__()
        self.group_norm = GroupNorm(config, channels)
        self.to_q, self.to_k, self.to_v = (Linear(channels, channels) for _ in range(3))
        self.qkv = LinearGroup(self.to_q, self.to_k, self.to_v)
        self.to_out = Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x: (1, channels, height, width)."""
        cells = self.group_norm(x).flatten(2).transpose(1, 2)
        # One head: attention takes (pictures, length, heads, channels)
        queries, keys, values = (part.unsqueeze(2) for part in self.qkv(cells))
        changed = self.to_out(attend(queries, keys, values).squeeze(2))
        y: torch.Tensor = x + changed.transpose(1, 2).reshape(x.shape)
        return y


class MidBlock(torch.nn.Module):  # type: ignore[misc]
    """A residual block, optional attention, a residual block."""

    def __init__(self, config: AutoencoderConfig, channels: int) -> None:
        super().__init__()
        self.resnets = torch.nn.ModuleList(
            ResnetBlock(config, channels, channels) for _ in range(2)
        )
        count = int(config.mid_block_add_attention)
        self.attentions = torch.nn.ModuleList(CellAttention(config, channels) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.resnets[0](x)
        for layer in self.attentions:
            x = layer(x)
        y: torch.Tensor = self.resnets[1](x)
        return y


class Upsample(torch.nn.Module):  # type: ignore[misc]
    """Nearest-neighbour upsampling by 2, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return y


class Downsample(torch.nn.Module):  # type: ignore[misc]
    """A convolution of every second pixel, padded below and on the right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, stride=2, padding=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(functional.pad(x, (0, 1, 0, 1)))
        return y


class UpBlock(torch.nn.Module):  # type: ignore[misc]
    """Residual blocks, then upsampling, except in the last block."""

    def __init__(
        self, config: AutoencoderConfig, channels: int, outputs: int, *, is_last: bool
    ) -> None:
        super().__init__()
        # The decoder has one residual block more than layers_per_block, as in the reference
        widths = [channels] + [outputs] * config.layers_per_block
        self.resnets = torch.nn.ModuleList(ResnetBlock(config, width, outputs) for width in widths)
        self.upsamplers = torch.nn.ModuleList([] if is_last else [Upsample(outputs)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.resnets:
            x = layer(x)
        for layer in self.upsamplers:
            x = layer(x)
        return x


class DownBlock(torch.nn.Module):  # type: ignore[misc]
    """Residual blocks, then downsampling, except in the last block."""

    def __init__(
        self, config: AutoencoderConfig, channels: int, outputs: int, *, is_last: bool
    ) -> None:
        super().__init__()
        widths = [channels] + [outputs] * (config.layers_per_block - 1)
        self.resnets = torch.nn.ModuleList(ResnetBlock(config, width, outputs) for width in widths)
        self.downsamplers = torch.nn.ModuleList([] if is_last else [Downsample(outputs)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.resnets:
            x = layer(x)
        for layer in self.downsamplers:
            x = layer(x)
        return x


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """(1, latent channels, height, width) to (1, 3, scale * height, scale * width)."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = config.block_out_channels[::-1]
        self.conv_in = Conv2d(config.latent_channels, widths[0])
        self.mid_block = MidBlock(config, widths[0])
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.up_blocks = torch.nn.ModuleList(
            UpBlock(config, before, after, is_last=index == len(pairs) - 1)
            for index, (before, after) in enumerate(pairs)
        )
        self.conv_norm_out = GroupNorm(config, widths[-1])
        self.conv_out = Conv2d(widths[-1], config.out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        y: torch.Tensor = self.conv_out(functional.silu(self.conv_norm_out(x)))
        return y


class Encoder(torch.nn.Module):  # type: ignore[misc]
    """(1, 3, scale * height, scale * width) to (1, 2 * latent channels, height, width)."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = config.block_out_channels
        self.conv_in = Conv2d(config.out_channels, widths[0])
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.down_blocks = torch.nn.ModuleList(
            DownBlock(config, before, after, is_last=index == len(pairs) - 1)
            for index, (before, after) in enumerate(pairs)
        )
        self.mid_block = MidBlock(config, widths[-1])
        self.conv_norm_out = GroupNorm(config, widths[-1])
        self.conv_out = Conv2d(widths[-1], 2 * config.latent_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        x = functional.silu(self.conv_norm_out(self.mid_block(x)))
        y: torch.Tensor = self.conv_out(x)
        return y


class AutoencoderHalf(TorchNetwork):
    """One half of an autoencoder. ``OTHERS``: the beginnings of names of unused tensors."""

    OTHERS: ClassVar[tuple[str, ...]]

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a diffusers tensor."""
        # In diffusers to_out is a list of a linear layer and dropout
        return name.replace(".to_out.0.", ".to_out.")

    def skip(self, name: str) -> bool:
        """Return True for tensors of the other half."""
        return name.startswith(self.OTHERS)


class LatentEncoder(AutoencoderHalf):
    """The encoder alone: only requests with a picture need it."""

    OTHERS: ClassVar[tuple[str, ...]] = ("decoder.", "post_quant_conv.")

    def __init__(self, config: AutoencoderConfig, _: TorchLibrary) -> None:
        self.module = torch.nn.Module()
        self.module.encoder = Encoder(config)
        self.module.quant_conv = None
        if config.use_quant_conv:
            width = 2 * config.latent_channels
            self.module.quant_conv = Conv2d(width, width, 1, padding=0)

    @computing
    def encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode pixels (height, width, 3), -1 to 1.

        Returns the means and standard deviations of the latents, (channels, height, width), not
        yet scaled and shifted.
        """
        x = self.module.encoder(pixels.permute(2, 0, 1)[None])
        if self.module.quant_conv is not None:
            x = self.module.quant_conv(x)
        # The second half of the channels is the logarithm of the variance
        means, logarithms = x[0].chunk(2)
        # The bounds are those of diffusers' DiagonalGaussianDistribution
        return means, torch.exp(0.5 * logarithms.clamp(-30, 20))


class LatentDecoder(AutoencoderHalf):
    """The decoder; the encoder is another network."""

    OTHERS: ClassVar[tuple[str, ...]] = ("encoder.", "quant_conv.")

    def __init__(self, config: AutoencoderConfig, library: TorchLibrary) -> None:
        self._library, self._channels = library, config.latent_channels
        self.module = torch.nn.Module()
        self.module.decoder = Decoder(config)
        self.module.post_quant_conv = None
        if config.use_post_quant_conv:
            width = config.latent_channels
            self.module.post_quant_conv = Conv2d(width, width, 1, padding=0)
        self._form = CompiledForm(library.compile_mode)

    def to_pixels(self, cells: torch.Tensor) -> torch.Tensor:
        """Decode (channels, height, width), as encoded, to (scale * height, scale * width, 3).

        Pixels are about -1 to 1, not clipped.
        """
        x = cells[None]
        if self.module.post_quant_conv is not None:
            x = self.module.post_quant_conv(x)
        run = self._form.select(None, self._warm)
        self._library.forms.add(EAGER if run is call_block else COMPILED)
        pixels: torch.Tensor = run(self.module.decoder, x)[0].permute(1, 2, 0)
        return pixels

    def close(self) -> None:
        """Release all tensors, as of ``TorchNetwork``."""
        self._form.close()
        super().close()

    def compile(self) -> None:
        """Begin to compile, or compile, by the mode of the library."""
        self._form.select(None, self._warm)

    def _warm(self, run: Run) -> None:
        """Compile the decoder; height and width are variables."""
        # Convolutions of small arrays are other code
        shape = 1, self._channels, 32, 40
        cells = torch.zeros(shape, device=self._library.device, dtype=self._library.dtype)
        mark_variable(cells, 2, 3)
        run(self.module.decoder, cells)

"""The networks of FLUX.2 [klein] on PyTorch, as those of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from clowder_aimage.model.flow.component import NetworkKinds
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.rope_table import compute_axes_table
from clowder_aimage.model.flow.time_embedding import embed_time
from clowder_aimage.model.flux2.config import PATCH, TransformerConfig, VaeConfig, rename_tensor
from clowder_aimage.model.flux2.family import STATES
from clowder_aimage.model.flux2.reference_picture import (
    Positions,
    ReferenceTokens,
    build_positions,
    place_words,
    to_tokens,
)
from clowder_aimage.model.torch.autoencoder import LatentDecoder, LatentEncoder
from clowder_aimage.model.torch.blocks import LENGTH, BlockRunner
from clowder_aimage.model.torch.compiler import Run
from clowder_aimage.model.torch.flux2.transformer import DoubleBlock, StepInputs, Transformer
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.network import TorchNetwork
from clowder_aimage.model.torch.operation import Table, build_parameter, to_table
from clowder_aimage.model.torch.step_cache import TorchStepCache
from clowder_aimage.model.torch.text_encoder import TextEncoder

# Recent sizes of pictures and captions, whose tables are cached
_SIZES = 16
# A counter of the training
_COUNT = "bn.num_batches_tracked"


class Flux2Network(TorchNetwork):
    """The transformer, for one picture."""

    module: Transformer
    blocks: BlockRunner

    def __init__(self, config: TransformerConfig, library: TorchLibrary) -> None:
        self._config, self._library = config, library
        self.module = Transformer(config, library.attention)
        self.blocks = BlockRunner(library, self._iter_blocks, self._build_arguments)
        self._table = lru_cache(_SIZES)(self._build_picture_table)

    @computing
    def build_caption(self, features: torch.Tensor) -> Caption:
        """Return text features (length, channels) embedded: (1, length, dim)."""
        return Caption(self.module.context_embedder(features[None]))

    @computing
    def __call__(
        self,
        latents: torch.Tensor,
        sigma: float,
        caption: Caption,
        pictures: ReferenceTokens | None,
        cache: TorchStepCache | None = None,
    ) -> torch.Tensor:
        """Return the velocity from picture to noise, in the shape of latents.

        With a ``cache``, all blocks but the first may be skipped.
        """
        channels, height, width = latents.shape
        inputs = self._build_inputs(latents, sigma, caption, pictures)
        count = height * width
        if cache is None:
            tokens = self.blocks.run(partial(self._compute, count), inputs, constant=count)
        else:
            tokens = self.module(inputs, count, self.blocks.select(), cache)
        return tokens[0].T.reshape(channels, height, width)

    def _compute(self, count: int, run: Run, inputs: StepInputs) -> torch.Tensor:
        velocity: torch.Tensor = self.module(inputs, count, run)
        return velocity

    def _build_inputs(
        self,
        latents: torch.Tensor,
        sigma: float,
        caption: Caption,
        pictures: ReferenceTokens | None,
    ) -> StepInputs:
        _, height, width = latents.shape
        # The reference scales the noise level by 1000, in float32
        features = embed_time(float(np.float32(sigma) * np.float32(1000)))[None, None]
        tokens, words = to_tokens(latents), caption.tokens.shape[1]
        if pictures is None:
            rope = self._table(words, height, width)
        else:
            tokens = torch.cat([tokens, pictures.tokens])
            positions = build_positions(0, height, width), pictures.positions
            rope = self._build_table(place_words(words), *positions)
        return StepInputs(tokens[None], self._library.to_array(features), caption.tokens, rope)

    def _build_picture_table(self, words: int, height: int, width: int) -> Table:
        return self._build_table(place_words(words), build_positions(0, height, width))

    def _build_table(self, *positions: Positions) -> Table:
        config = self._config
        arrays = compute_axes_table(
            np.concatenate(positions), config.axes_dims, config.rope_theta, is_exact=True
        )
        return to_table(arrays, self._library.device)

    def _iter_blocks(self) -> Iterator[torch.nn.Module]:
        yield from (*self.module.transformer_blocks, *self.module.single_transformer_blocks)

    def _build_arguments(self, block: torch.nn.Module) -> tuple[Any, ...]:
        dim, build = self._config.dim, self.blocks.build_length
        is_double = isinstance(block, DoubleBlock)
        length = 2 * LENGTH if is_double else LENGTH
        shape = 1, length, 1, self._config.head_dim // 2
        rope = build(*shape, dtype=torch.float32), build(*shape, dtype=torch.float32)
        if is_double:
            modulations = (self.blocks.build_tensor(1, 1, 6 * dim) for _ in range(2))
            streams = (build(1, LENGTH, dim) for _ in range(2))
            return *streams, rope, *modulations
        return build(1, LENGTH, dim), rope, self.blocks.build_tensor(1, 1, 3 * dim)

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a diffusers tensor."""
        return rename_tensor(name)


class ChannelStatistics(torch.nn.Module):  # type: ignore[misc]
    """The means and variances of the channels of patches."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        channels, self.eps = PATCH * PATCH * config.latent_channels, config.batch_norm_eps
        self.running_mean, self.running_var = (build_parameter(channels) for _ in range(2))

    def compute_moments(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and deviations for patches (channels, height, width)."""
        mean, variance = self.running_mean[:, None, None], self.running_var[:, None, None]
        return mean.to(like.dtype), torch.sqrt(variance.float() + self.eps).to(like.dtype)


class Decoder(LatentDecoder):
    """The decoder of ``AutoencoderKLFlux2``: latents are normalized patches."""

    OTHERS = (*LatentDecoder.OTHERS, _COUNT)

    def __init__(self, config: VaeConfig, library: TorchLibrary) -> None:
        super().__init__(config, library)
        self.module.bn = ChannelStatistics(config)

    @computing
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (4 * channels, height, width) to pixels, about -1 to 1, not clipped."""
        mean, deviation = self.module.bn.compute_moments(latents)
        _, rows, columns = latents.shape
        patches = (latents * deviation + mean).reshape(-1, PATCH, PATCH, rows, columns)
        cells = patches.permute(0, 3, 1, 4, 2).reshape(-1, PATCH * rows, PATCH * columns)
        return self.to_pixels(cells)


class Encoder(LatentEncoder):
    """The encoder of ``AutoencoderKLFlux2``."""

    OTHERS = (*LatentEncoder.OTHERS, _COUNT)

    def __init__(self, config: VaeConfig, library: TorchLibrary) -> None:
        super().__init__(config, library)
        self.module.bn = ChannelStatistics(config)

    @computing
    def normalize(self, cells: torch.Tensor) -> torch.Tensor:
        """Return encoded cells (channels, height, width) as latents: normalized patches."""
        channels, height, width = cells.shape
        rows, columns = height // PATCH, width // PATCH
        patches = cells.reshape(channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3)
        patches = patches.reshape(-1, rows, columns)
        mean, deviation = self.module.bn.compute_moments(patches)
        return (patches - mean) / deviation


NETWORKS = NetworkKinds(partial(TextEncoder, outputs=STATES), Flux2Network, Decoder, Encoder)

"""The networks of FLUX.2 [klein] on PyTorch, as those of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from clowder_aimage.model.flow.component import NetworkKinds
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flux2.config import PATCH, TransformerConfig, VaeConfig, rename_tensor
from clowder_aimage.model.flux2.family import STATES
from clowder_aimage.model.flux2.reference_picture import (
    ReferenceTokens,
    build_positions,
    place_words,
    to_tokens,
)
from clowder_aimage.model.torch.autoencoder import LatentDecoder, LatentEncoder
from clowder_aimage.model.torch.blocks import LENGTH, ExampleInputs
from clowder_aimage.model.torch.compiler import Run
from clowder_aimage.model.torch.flux2.transformer import DoubleBlock, StepInputs, Transformer
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.operation import Table, build_parameter
from clowder_aimage.model.torch.step_cache import TorchStepCache
from clowder_aimage.model.torch.text_encoder import TextEncoder
from clowder_aimage.model.torch.transformer_network import (
    PassInputs,
    TransformerNetwork,
    stack_captions,
    stack_tables,
)

# A counter of the training
_COUNT = "bn.num_batches_tracked"


class Flux2Network(TransformerNetwork):
    """The transformer."""

    module: Transformer
    IS_EXACT = True

    def __init__(self, config: TransformerConfig, library: TorchLibrary) -> None:
        super().__init__(config, library, Transformer(config, library.attention))

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
        inputs = self._build_inputs([(latents, sigma, caption)], pictures)
        count = height * width
        if cache is None:
            tokens = self.blocks.run(partial(self._compute, count), inputs, constant=count)
        else:
            tokens = self.module(inputs, count, self.blocks.select(), cache)
        return tokens[0].T.reshape(channels, height, width)

    @computing
    def compute_batch(self, passes: Sequence[PassInputs]) -> list[torch.Tensor]:
        channels, height, width = passes[0][0].shape
        count, inputs = height * width, self._build_inputs(passes)
        options: dict[str, Any] = {"constant": count, "is_batch": True}
        tokens = self.blocks.run(partial(self._compute, count), inputs, **options)
        return [each.T.reshape(channels, height, width) for each in tokens]

    def _compute(self, count: int, run: Run, inputs: StepInputs) -> torch.Tensor:
        velocity: torch.Tensor = self.module(inputs, count, run)
        return velocity

    def _build_inputs(
        self, passes: Sequence[PassInputs], pictures: ReferenceTokens | None = None
    ) -> StepInputs:
        """Return the tensors of a forward pass; only one alone has reference ``pictures``."""
        latents, sigmas, captions = zip(*passes, strict=True)
        _, height, width = latents[0].shape
        # The reference scales the noise level by 1000, in float32
        features = self._embed_times(sigmas, 1000)
        tokens, (caption, _) = [to_tokens(each) for each in latents], stack_captions(captions)
        words = caption.shape[1]
        if pictures is None:
            (table,) = self._recall_tables(words, height, width)
            rope = stack_tables([table] * len(passes), table[0].shape[1])
        else:
            tokens = [torch.cat([*tokens, pictures.tokens])]
            positions = build_positions(0, height, width), pictures.positions
            rope = self._build_table(place_words(words), *positions)
        return StepInputs(torch.stack(tokens), features, caption, rope)

    def _build_tables(self, words: int, rows: int, columns: int) -> tuple[Table, ...]:
        return (self._build_table(place_words(words), build_positions(0, rows, columns)),)

    def _iter_blocks(self) -> Iterator[torch.nn.Module]:
        yield from (*self.module.transformer_blocks, *self.module.single_transformer_blocks)

    def _build_arguments(self, block: torch.nn.Module, example: ExampleInputs) -> Sequence[Any]:
        dim, is_double = self._config.dim, isinstance(block, DoubleBlock)
        streams = [example.build(LENGTH, dim) for _ in range(2 if is_double else 1)]
        rope = example.build_table(len(streams) * LENGTH, self._config.head_dim)
        width = 6 * dim if is_double else 3 * dim
        return *streams, rope, *(example.build_once(1, width) for _ in streams)

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

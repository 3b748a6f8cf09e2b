"""The networks of FLUX.2 [klein] on PyTorch: those of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

from clowder_aimage.model.flow.component import NetworkKinds
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flux2.config import PATCH, TransformerConfig, VaeConfig
from clowder_aimage.model.flux2.family import STATES
from clowder_aimage.model.flux2.reference_picture import ReferenceTokens, build_positions, to_tokens
from clowder_aimage.model.torch.library import computing
from clowder_aimage.model.torch.network import (
    DecoderHalf,
    DiffusersNetwork,
    EncoderHalf,
    QwenEncoder,
    stack_layers,
)
from clowder_aimage.model.torch.step_cache import TorchStepCache, replace_layers


class Flux2Network(DiffusersNetwork):
    """``Flux2Transformer2DModel``, for one picture."""

    def __init__(self, config: TransformerConfig, fields: Mapping[str, Any]) -> None:
        self.module = stack_layers(
            Flux2Transformer2DModel,
            fields,
            transformer_blocks=("num_layers", config.num_layers),
            single_transformer_blocks=("num_single_layers", config.num_single_layers),
        )

    def build_caption(self, features: torch.Tensor) -> Caption:
        """Return text features (length, channels) and their positions."""
        length = torch.arange(len(features), device=features.device)
        return Caption(features, (torch.nn.functional.pad(length[:, None], (3, 0)),))

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

        With a ``cache``, all layers but the first may be skipped.
        """
        channels, height, width = latents.shape
        tokens, positions = to_tokens(latents), build_positions(0, height, width)
        if pictures is not None:
            tokens = torch.cat([tokens, pictures.tokens])
            positions = np.concatenate([positions, pictures.positions])
        layers = {} if cache is None else _wrap_layers(self.module, cache)
        with replace_layers(self.module, **layers):
            output = self.module(
                hidden_states=tokens[None],
                encoder_hidden_states=caption.tokens[None],
                timestep=torch.tensor([sigma], device=latents.device),
                img_ids=torch.from_numpy(positions).to(latents.device),
                txt_ids=caption.rope[0],
                return_dict=False,
            )[0][0, : height * width]
        velocity: torch.Tensor = output.T.reshape(channels, height, width)
        return velocity


def _wrap_layers(module: Any, cache: TorchStepCache) -> dict[str, tuple[Any, ...]]:
    """Return the layers by their lists: the first, and all others, skipped by the cache."""
    doubles, singles = module.transformer_blocks, module.single_transformer_blocks

    def run_first(**keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        text, picture = doubles[0](**keywords)
        before = keywords["encoder_hidden_states"], keywords["hidden_states"]
        cache.begin(torch.cat(before, dim=1), torch.cat((text, picture), dim=1))
        return text, picture

    def double(**keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        text, picture = keywords.pop("encoder_hidden_states"), keywords.pop("hidden_states")
        for block in () if cache.is_reused else doubles[1:]:
            text, picture = block(hidden_states=picture, encoder_hidden_states=text, **keywords)
        return text, picture

    def run_singles(hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            for block in singles:
                x = block(hidden_states=x, **keywords)
            return x

        return cache.end(hidden_states, run)

    return {"transformer_blocks": (run_first, double), "single_transformer_blocks": (run_singles,)}


class Flux2Decoder(DecoderHalf):
    """The decoder of ``AutoencoderKLFlux2``."""

    def __init__(self, config: VaeConfig, fields: Mapping[str, Any]) -> None:
        super().__init__(AutoencoderKLFlux2, fields)
        self._eps = config.batch_norm_eps

    @computing
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (4 * channels, height, width) to pixels, about -1 to 1, not clipped."""
        mean, deviation = _compute_moments(self.module.bn, self._eps, latents)
        _, rows, columns = latents.shape
        patches = (latents * deviation + mean).reshape(-1, PATCH, PATCH, rows, columns)
        cells = patches.permute(0, 3, 1, 4, 2).reshape(-1, PATCH * rows, PATCH * columns)
        return self.to_pixels(cells)


class Flux2Encoder(EncoderHalf):
    """The encoder of ``AutoencoderKLFlux2``."""

    def __init__(self, config: VaeConfig, fields: Mapping[str, Any]) -> None:
        super().__init__(AutoencoderKLFlux2, fields)
        self._eps = config.batch_norm_eps

    @computing
    def normalize(self, cells: torch.Tensor) -> torch.Tensor:
        """Return encoded cells (channels, height, width) as latents: normalized patches."""
        channels, height, width = cells.shape
        rows, columns = height // PATCH, width // PATCH
        patches = cells.reshape(channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3)
        patches = patches.reshape(-1, rows, columns)
        mean, deviation = _compute_moments(self.module.bn, self._eps, patches)
        return (patches - mean) / deviation


def _compute_moments(
    norm: Any, eps: float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    mean, variance = norm.running_mean[:, None, None], norm.running_var[:, None, None]
    return mean.to(like.dtype), torch.sqrt(variance.float() + eps).to(like.dtype)


NETWORKS = NetworkKinds(
    partial(QwenEncoder, outputs=STATES), Flux2Network, Flux2Decoder, Flux2Encoder
)

"""The networks of Z-Image on PyTorch: those of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL, ZImageControlNetModel, ZImageTransformer2DModel

from clowder_aimage.model.flow.component import ControlKind, NetworkKinds
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.torch.library import computing
from clowder_aimage.model.torch.network import (
    DecoderHalf,
    DiffusersNetwork,
    EncoderHalf,
    QwenEncoder,
    stack_layers,
)
from clowder_aimage.model.torch.step_cache import TorchStepCache, replace_layers
from clowder_aimage.model.zimage.config import TransformerConfig, VaeConfig
from clowder_aimage.model.zimage.control_config import (
    LAYERS,
    REFINER,
    ControlNetConfig,
    read_control_config,
)

Hints = Callable[[], Mapping[int, torch.Tensor]]


class ZImageNetwork(DiffusersNetwork):
    """``ZImageTransformer2DModel``, for one picture."""

    def __init__(self, config: TransformerConfig, fields: Mapping[str, Any]) -> None:
        count = "n_layers", config.n_layers
        self.module = stack_layers(ZImageTransformer2DModel, fields, layers=count)

    def build_caption(self, features: torch.Tensor) -> Caption:
        """Return text features (length, channels); every step refines them."""
        return Caption(features)

    @computing
    def __call__(
        self,
        latents: torch.Tensor,
        time: float,
        caption: Caption,
        cache: TorchStepCache | None = None,
        hints: Hints = dict,
    ) -> torch.Tensor:
        """Return the velocity for latents (channels, height, width); time: 0 (noise) to 1.

        With a ``cache``, all layers but the first may be skipped. ``hints`` returns those of a
        control network, by layer; they are not made if layers are skipped.
        """
        arguments = _build_arguments(latents, time, caption)
        if cache is None:
            output = self.module(*arguments, controlnet_block_samples=hints(), return_dict=False)
        else:
            with replace_layers(self.module, layers=_wrap_layers(self.module.layers, cache, hints)):
                output = self.module(*arguments, return_dict=False)
        velocity: torch.Tensor = output[0][0][:, 0]
        return velocity

    def skip(self, name: str) -> bool:
        """Return True for tensors that only image-conditioned variants have."""
        return name.startswith("siglip_")


def _wrap_layers(layers: Any, cache: TorchStepCache, hints: Hints) -> tuple[Any, Any]:
    """Return the first layer, and all others with the hints, skipped by the cache."""

    def run_first(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        after: torch.Tensor = layers[0](x, *arguments)
        cache.begin(x, after)
        return after

    def run_others(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            layer_hints = hints()
            for index, layer in enumerate(layers):
                x = layer(x, *arguments) if index else x
                x = x + layer_hints[index] if index in layer_hints else x
            return x

        return cache.end(x, run)

    return run_first, run_others


class ControlNetwork(DiffusersNetwork):
    """``ZImageControlNetModel``, with parts of the transformer."""

    def __init__(self, config: ControlNetConfig, _: Mapping[str, Any]) -> None:
        self._refiner, block = config.refiner, config.block
        self.module = ZImageControlNetModel(
            control_layers_places=list(config.places),
            control_refiner_layers_places=list(config.refiner_places),
            control_in_dim=config.in_channels,
            add_control_noise_refiner=config.refiner or None,
            dim=block.dim,
            n_refiner_layers=block.n_refiner_layers,
            n_heads=block.n_heads,
            n_kv_heads=block.n_heads,
            norm_eps=block.norm_eps,
            qk_norm=block.qk_norm,
        )

    @computing
    def __call__(
        self,
        transformer: ZImageNetwork,
        latents: torch.Tensor,
        time: float,
        caption: Caption,
        cells: torch.Tensor,
        strength: float,
    ) -> Any:
        """Return the hints of a forward pass of the transformer with the same arguments."""
        module = ZImageControlNetModel.from_transformer(self.module, transformer.module)
        arguments = _build_arguments(latents, time, caption)
        return module(*arguments, [cells[:, None]], conditioning_scale=strength)

    def skip(self, name: str) -> bool:
        """Return True for the unused refiner in files of 2.0."""
        return self._refiner == LAYERS and name.startswith(f"{REFINER}.")


class KlDecoder(DecoderHalf):
    """The decoder of ``AutoencoderKL``."""

    def __init__(self, config: VaeConfig, fields: Mapping[str, Any]) -> None:
        super().__init__(AutoencoderKL, fields)
        self._scale, self._shift = config.scaling_factor, config.shift_factor

    @computing
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (channels, height, width) to pixels, about -1 to 1, not clipped."""
        return self.to_pixels(latents / self._scale + self._shift)


class KlEncoder(EncoderHalf):
    """The encoder of ``AutoencoderKL``."""

    def __init__(self, _: VaeConfig, fields: Mapping[str, Any]) -> None:
        super().__init__(AutoencoderKL, fields)


def _build_arguments(
    latents: torch.Tensor, time: float, caption: Caption
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    times = torch.tensor([time], dtype=torch.float32, device=latents.device)
    return [latents[:, None]], times, [caption.tokens]


NETWORKS = NetworkKinds(
    QwenEncoder,
    ZImageNetwork,
    KlDecoder,
    KlEncoder,
    ControlKind(ControlNetwork, read_control_config),
)

"""The networks of Z-Image on PyTorch, as those of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from clowder_aimage.model.flow.component import ControlKind, NetworkKinds
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.rope_table import compute_axes_table
from clowder_aimage.model.flow.time_embedding import embed_time
from clowder_aimage.model.torch.autoencoder import LatentDecoder, LatentEncoder
from clowder_aimage.model.torch.blocks import LENGTH, BlockRunner
from clowder_aimage.model.torch.compiler import Run
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.network import TorchNetwork
from clowder_aimage.model.torch.operation import Table, to_table
from clowder_aimage.model.torch.step_cache import TorchStepCache
from clowder_aimage.model.torch.text_encoder import TextEncoder
from clowder_aimage.model.torch.zimage.control import ControlNet
from clowder_aimage.model.torch.zimage.transformer import (
    Hints,
    StepInputs,
    Transformer,
    to_latents,
    to_patches,
)
from clowder_aimage.model.zimage.config import (
    PATCH,
    Positions,
    TransformerConfig,
    VaeConfig,
    pad_length,
    place_caption,
    place_image,
    rename_tensor,
)
from clowder_aimage.model.zimage.control_config import (
    LAYERS,
    REFINER,
    ControlNetConfig,
    read_control_config,
)

# Recent sizes of pictures and captions, whose tables are cached
_SIZES = 16


class ZImageNetwork(TorchNetwork):
    """The transformer, for one picture."""

    module: Transformer
    blocks: BlockRunner

    def __init__(self, config: TransformerConfig, library: TorchLibrary) -> None:
        self._config, self._library = config, library
        self.module = Transformer(config, library.attention)
        self.blocks = BlockRunner(library, self._iter_blocks, self._build_arguments)
        self._tables = lru_cache(_SIZES)(self._build_tables)

    @computing
    def build_caption(self, features: torch.Tensor) -> Caption:
        """Return text features (length, channels) embedded and refined: (1, length, dim)."""
        rope = self._build_table(place_caption(pad_length(len(features))))
        return Caption(self.module.refine_caption(features[None], rope))

    @computing
    def __call__(
        self,
        latents: torch.Tensor,
        time: float,
        caption: Caption,
        cache: TorchStepCache | None = None,
        hints: Callable[[], Hints] = dict,
    ) -> torch.Tensor:
        """Return the velocity for latents (channels, height, width); time: 0 (noise) to 1.

        With a ``cache``, all layers but the first may be skipped. ``hints`` returns those of a
        control network, by layer; they are not made if layers are skipped.
        """
        inputs = self.build_inputs(latents, time, caption)
        if cache is None:
            patches = self.blocks.run(self._compute, inputs, dict(hints()))
        else:
            patches = self.module(inputs, hints, cache, self.blocks.select())
        return to_latents(patches[0], tuple(latents.shape))

    def _compute(self, run: Run, inputs: StepInputs, hints: Hints) -> torch.Tensor:
        velocity: torch.Tensor = self.module(inputs, lambda: hints, None, run)
        return velocity

    def build_inputs(self, latents: torch.Tensor, time: float, caption: Caption) -> StepInputs:
        """Return the tensors of a forward pass."""
        _, height, width = latents.shape
        scaled = float(np.float32(time) * np.float32(self._config.t_scale))
        features = self._library.to_array(embed_time(scaled)[None, None])
        shape = height // PATCH, width // PATCH, caption.tokens.shape[1]
        return StepInputs(to_patches(latents), features, caption.tokens, *self._tables(*shape))

    def _build_tables(self, rows: int, columns: int, caption: int) -> tuple[Table, Table]:
        """Return the tables of a picture, and of it with its caption."""
        image = place_image(rows, columns, caption)
        joint = np.concatenate([image, place_caption(caption)])
        return self._build_table(image), self._build_table(joint)

    def _build_table(self, positions: Positions) -> Table:
        config = self._config
        arrays = compute_axes_table(positions, config.axes_dims, config.rope_theta)
        return to_table(arrays, self._library.device)

    def _iter_blocks(self) -> Iterator[torch.nn.Module]:
        yield from (*self.module.noise_refiner, *self.module.layers)

    def _build_arguments(self, _: torch.nn.Module) -> tuple[Any, ...]:
        return build_arguments(self._config, self.blocks)

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a diffusers tensor."""
        return rename_tensor(name)

    def skip(self, name: str) -> bool:
        """Return True for tensors that only image-conditioned variants have."""
        return name.startswith("siglip_")


class ControlNetwork(TorchNetwork):
    """The control network, with parts of the transformer."""

    module: ControlNet
    blocks: BlockRunner

    def __init__(self, config: ControlNetConfig, library: TorchLibrary) -> None:
        self._refiner, self._block = config.refiner, config.block
        self.module = ControlNet(config, library.attention)
        self.blocks = BlockRunner(library, self._iter_blocks, self._build_arguments)

    @computing
    def __call__(
        self,
        transformer: ZImageNetwork,
        latents: torch.Tensor,
        time: float,
        caption: Caption,
        cells: torch.Tensor,
        strength: float,
    ) -> Hints:
        """Return the hints of a forward pass of the transformer with the same arguments."""
        inputs = transformer.build_inputs(latents, time, caption), to_patches(cells)
        runs = self.blocks.select(), transformer.blocks.select()
        hints: Hints = self.module(transformer.module, *inputs, strength, *runs)
        return hints

    def _iter_blocks(self) -> Iterator[torch.nn.Module]:
        yield from self.module.control_layers
        yield from getattr(self.module, REFINER, ())

    def _build_arguments(self, block: torch.nn.Module) -> tuple[Any, ...]:
        context, rope, time = build_arguments(self._block, self.blocks)
        x = self.blocks.build_length(*context.shape) if hasattr(block, "before_proj") else None
        return context, rope, time, x

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor."""
        return rename_tensor(name)

    def skip(self, name: str) -> bool:
        """Return True for the unused refiner in files of 2.0."""
        return self._refiner == LAYERS and name.startswith(f"{REFINER}.")


def build_arguments(
    config: TransformerConfig, blocks: BlockRunner
) -> tuple[torch.Tensor, Table, torch.Tensor]:
    """Return arguments of a block, of any values."""
    build, shape = blocks.build_length, (1, LENGTH, 1, config.head_dim // 2)
    rope = build(*shape, dtype=torch.float32), build(*shape, dtype=torch.float32)
    time = blocks.build_tensor(1, 1, config.modulation_dim)
    return build(1, LENGTH, config.dim), rope, time


class Decoder(LatentDecoder):
    """The decoder of ``AutoencoderKL``."""

    def __init__(self, config: VaeConfig, library: TorchLibrary) -> None:
        super().__init__(config, library)
        self._scale, self._shift = config.scaling_factor, config.shift_factor

    @computing
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (channels, height, width) to pixels, about -1 to 1, not clipped."""
        return self.to_pixels(latents / self._scale + self._shift)


NETWORKS = NetworkKinds(
    TextEncoder,
    ZImageNetwork,
    Decoder,
    LatentEncoder,
    ControlKind(ControlNetwork, read_control_config),
)

"""The networks of Z-Image on PyTorch, as those of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from clowder_aimage.model.flow.component import ControlKind, NetworkKinds
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.torch.autoencoder import LatentDecoder, LatentEncoder
from clowder_aimage.model.torch.blocks import LENGTH, BlockRunner, ExampleInputs
from clowder_aimage.model.torch.compiler import Run
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.network import TorchNetwork
from clowder_aimage.model.torch.operation import Table
from clowder_aimage.model.torch.step_cache import TorchStepCache
from clowder_aimage.model.torch.text_encoder import TextEncoder
from clowder_aimage.model.torch.transformer_network import (
    PassInputs,
    TransformerNetwork,
    stack_captions,
    stack_tables,
)
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


class ZImageNetwork(TransformerNetwork):
    """The transformer."""

    module: Transformer

    def __init__(self, config: TransformerConfig, library: TorchLibrary) -> None:
        super().__init__(config, library, Transformer(config, library.attention))

    @computing
    def build_caption(self, features: torch.Tensor) -> Caption:
        """Return text features (length, channels) embedded and refined: (1, length, dim)."""
        rope = self._build_table(place_caption(pad_length(len(features))))
        return Caption(self.module.refine_caption(features[None], rope))

    def get_caption_key(self, caption: Caption) -> tuple[int, ...]:
        # A backend of attention may have no masks
        is_masked = self._library.tuning.attention is None
        return () if is_masked else super().get_caption_key(caption)

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
        inputs = self.build_inputs([(latents, time, caption)])
        if cache is None:
            patches = self.blocks.run(self._compute, inputs, dict(hints()))
        else:
            patches = self.module(inputs, hints, cache, self.blocks.select())
        return to_latents(patches[0], tuple(latents.shape))

    @computing
    def compute_batch(self, passes: Sequence[PassInputs]) -> list[torch.Tensor]:
        inputs, shape = self.build_inputs(passes), tuple(passes[0][0].shape)
        options = {"is_batch": True, "has_mask": bool(inputs.masks)}
        patches = self.blocks.run(self._compute, inputs, {}, **options)
        return [to_latents(each, shape) for each in patches]

    def _compute(self, run: Run, inputs: StepInputs, hints: Hints) -> torch.Tensor:
        velocity: torch.Tensor = self.module(inputs, lambda: hints, None, run)
        return velocity

    def build_inputs(self, passes: Sequence[PassInputs]) -> StepInputs:
        """Return the tensors of a forward pass, for pictures of one size."""
        latents, times, captions = zip(*passes, strict=True)
        patches = torch.cat([to_patches(each) for each in latents])
        _, height, width = latents[0].shape
        size = height // PATCH, width // PATCH
        tables = [self._recall_tables(caption.tokens.shape[1], *size) for caption in captions]
        tokens, words = stack_captions(captions)
        image_length = tables[0][0][0].shape[1]
        image_rope = stack_tables([image for image, _ in tables], image_length)
        rope = stack_tables([joint for _, joint in tables], image_length + tokens.shape[1])
        masks: tuple[torch.Tensor, ...] = ()
        if words is not None:
            image = words.new_ones((len(passes), image_length))
            masks = (torch.cat((image, words), dim=1)[:, None, None],)
        features = self._embed_times(times, self._config.t_scale)
        return StepInputs(patches, features, tokens, image_rope, rope, masks)

    def _build_tables(self, words: int, rows: int, columns: int) -> tuple[Table, ...]:
        """Return the tables of a picture, and of it with its caption."""
        image, caption = place_image(rows, columns, words), place_caption(words)
        return self._build_table(image), self._build_table(image, caption)

    def _iter_blocks(self) -> Iterator[torch.nn.Module]:
        yield from (*self.module.noise_refiner, *self.module.layers)

    def _build_arguments(self, block: torch.nn.Module, example: ExampleInputs) -> Sequence[Any]:
        is_refiner = any(block is each for each in self.module.noise_refiner)
        masks = () if is_refiner else example.build_masks()
        return *build_arguments(self._config, example), *masks

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
        inputs = transformer.build_inputs([(latents, time, caption)]), to_patches(cells)
        runs = self.blocks.select(), transformer.blocks.select()
        hints: Hints = self.module(transformer.module, *inputs, strength, *runs)
        return hints

    def _iter_blocks(self) -> Iterator[torch.nn.Module]:
        yield from self.module.control_layers
        yield from getattr(self.module, REFINER, ())

    def _build_arguments(self, block: torch.nn.Module, example: ExampleInputs) -> Sequence[Any]:
        arguments = build_arguments(self._block, example)
        has_input = hasattr(block, "before_proj")
        return *arguments, example.build(LENGTH, self._block.dim) if has_input else None

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor."""
        return rename_tensor(name)

    def skip(self, name: str) -> bool:
        """Return True for the unused refiner in files of 2.0."""
        return self._refiner == LAYERS and name.startswith(f"{REFINER}.")


def build_arguments(
    config: TransformerConfig, example: ExampleInputs
) -> tuple[torch.Tensor, Table, torch.Tensor]:
    """Return arguments of a block, of any values."""
    rope = example.build_table(LENGTH, config.head_dim)
    return example.build(LENGTH, config.dim), rope, example.build_once(1, config.modulation_dim)


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

"""Z-Image, with networks of any library.

Follows ``ZImagePipeline`` of diffusers 0.42, but never pads texts (the reference masks its
padding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.check import build_parameter_error
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.component import read_config
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.family import Pixels, check_channels
from clowder_aimage.model.flow.memory_budget import Module
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.picture_encoder import PictureEncoder, to_values
from clowder_aimage.model.flow.picture_size import Sides
from clowder_aimage.model.flow.picture_start import EncodedPicture, find_painted_cells
from clowder_aimage.model.flow.scheduler import FlowScheduler, Schedule
from clowder_aimage.model.pipeline import PictureInput
from clowder_aimage.model.zimage.config import (
    MULTIPLE,
    PATCH,
    TransformerConfig,
    VaeConfig,
    pad_length,
)
from clowder_aimage.model.zimage.control_config import ControlNetConfig, to_input
from clowder_aimage.model.zimage.latent_colour import has_colours, to_rgb


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """The control of a generation: its network, the network's input, and the factor of hints.

    cells: an array of the library, (in_channels, height, width).
    """

    # It may have been released since the last step
    network: Callable[[], Any]
    cells: Any
    strength: float

    def compute_hints(self, transformer: Any, latents: Any, time: float, caption: Any) -> Any:
        """Return the hints of a forward pass of the transformer."""
        arguments = transformer, latents, time, caption
        return self.network()(*arguments, self.cells, self.strength)


@dataclass(frozen=True, slots=True)
class ZImage:
    """A Z-Image model. Raises ModelError: its networks do not fit each other."""

    IS_THINKING: ClassVar[bool] = True
    CAPTIONING: ClassVar[tuple[str, ...]] = (
        "text_encoder/",
        "transformer/context_refiner.",
        "transformer/cap_embedder.",
        "transformer/cap_pad_token",
    )
    TEXT_LENGTH: ClassVar[int | None] = None
    # Picture and caption are each padded
    TOKEN_MULTIPLE: ClassVar[int] = MULTIPLE

    text_encoder: TextEncoderConfig
    transformer: TransformerConfig
    vae: VaeConfig
    scheduler: FlowScheduler

    def __post_init__(self) -> None:
        check_channels(
            self.text_encoder.hidden_size,
            self.transformer.cap_feat_dim,
            self.vae.latent_channels,
            self.transformer.in_channels,
            self.vae.out_channels,
        )

    @classmethod
    def read(cls, store: BlobFiles, aimage: AImage) -> ZImage:
        """Read the configurations of a model. Raises ModelError."""
        read = partial(read_config, store, aimage)
        return cls(
            read("text_encoder/config.json", TextEncoderConfig.parse),
            read("transformer/config.json", TransformerConfig.parse),
            read("vae/config.json", VaeConfig.parse),
            read("scheduler/scheduler_config.json", FlowScheduler.parse),
        )

    @property
    def sides(self) -> Sides:
        multiple = self.vae.scale * PATCH
        _, rows, columns = self.transformer.axes_lens
        return Sides(multiple, columns * multiple, rows * multiple)

    @property
    def layer(self) -> tuple[int, int, int]:
        return self.transformer.dim, self.transformer.ffn_dim, self.transformer.n_heads

    def refuse(self, request: GenerateRequest) -> None:
        if request.input.references:
            raise UsageError(
                "this model does not see reference pictures",
                hint="give the picture as the image to begin with",
                parameter="references",
            )

    def check_length(self, tokens: int) -> None:
        positions = self.transformer.axes_lens[0]
        if pad_length(tokens) + 2 > positions:
            raise build_parameter_error(
                "prompt", f"is too long: {tokens} tokens and padding exceed {positions} positions"
            )

    def compute_guidance_weight(self, request: GenerateRequest) -> float:
        return request.guidance.scale

    def compute_latent_shape(self, request: GenerateRequest) -> tuple[int, int, int]:
        scale = self.vae.scale
        return (
            self.transformer.in_channels,
            request.sampling.height // scale,
            request.sampling.width // scale,
        )

    def schedule(self, steps: int, tokens: int, shift: float | None) -> Schedule:
        return self.scheduler.schedule(steps, tokens, shift)

    def normalize(self, latents: Floats, networks: FlowNetworks) -> Floats:  # noqa: ARG002
        shift, scale = np.float32(self.vae.shift_factor), np.float32(self.vae.scaling_factor)
        return (latents - shift) * scale

    def fit(self, pictures: PictureInput) -> PictureInput:
        return pictures

    def encode_pictures(
        self,
        request: GenerateRequest,
        pictures: PictureInput,
        encoder: PictureEncoder,
        control: Module | None,
    ) -> tuple[EncodedPicture | None, Control | None]:
        """Return the picture to begin with and the control, evaluated.

        With a control network for masks, the whole picture begins as noise, unless the strength is
        below 1. Raises as ``ModelWeights.apply`` does.
        """
        inputs, is_inside = None, False
        if pictures.control is not None and control is not None:
            config: ControlNetConfig = control.config
            is_inside = pictures.mask is not None and config.has_mask
            hidden = self._mask(pictures, encoder) if is_inside else None
            values = to_input(config, encoder.encode_mode(to_values(pictures.control)), hidden)
            strength = request.control.strength or 0.0
            inputs = Control(control.get, encoder.library.to_array(values), strength)
        encoded = None if is_inside and request.input.strength == 1 else encoder.begin(pictures)
        encoder.finish()
        return encoded, inputs

    def _mask(self, pictures: PictureInput, encoder: PictureEncoder) -> tuple[Floats, Floats]:
        """Return the cells to paint, and the scaled latents of the picture without them."""
        assert pictures.pixels is not None and pictures.mask is not None  # noqa: S101 - was checked
        values = to_values(pictures.pixels) * (pictures.mask < 128)[..., None]
        return find_painted_cells(pictures.mask, self.vae.scale), encoder.encode_mode(values)

    def predict_velocity(
        self,
        transformer: Any,
        latents: Any,
        time: float,
        caption: Caption,
        inputs: Control | None,
        cache: Any,
    ) -> Any:
        arguments = latents, time, caption
        hints: Callable[[], Any] = dict
        if inputs is not None:
            hints = partial(inputs.compute_hints, transformer, *arguments)
        return transformer(*arguments, cache, hints)

    def predict_velocities(
        self, transformer: Any, passes: Sequence[tuple[Any, float, Caption]]
    ) -> Sequence[Any]:
        return cast("Sequence[Any]", transformer.compute_batch(passes))

    @property
    def draft(self) -> Callable[[Floats], Pixels] | None:
        return partial(to_rgb, scale=self.vae.scale // 2) if has_colours(self.vae) else None

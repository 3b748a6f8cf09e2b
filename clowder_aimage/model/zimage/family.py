"""Z-Image, with networks of any library.

Follows ``ZImagePipeline`` of diffusers 0.42, but never pads texts (the reference masks its
padding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import UsageError
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.component import ModelComponents
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.family import check_channels
from clowder_aimage.model.flow.memory_budget import Module, OffloadedModule
from clowder_aimage.model.flow.picture_start import EncodedPicture, cells_of
from clowder_aimage.model.flow.pipeline import FlowPipeline, to_values
from clowder_aimage.model.pipeline import GenerateRequest, PictureInput, Sides, StoredControlNet
from clowder_aimage.model.zimage.config import PATCH, TransformerConfig, VaeConfig
from clowder_aimage.model.zimage.control_config import (
    ControlModule,
    open_controlnet,
    own_controlnet,
    to_input,
)
from clowder_aimage.model.zimage.latent_colour import colours, has_colours

MULTIPLE = 32  # image and caption are each padded to a multiple of this many tokens


def padded(length: int) -> int:
    """Return the length rounded up to a multiple of 32."""
    return -(-length // MULTIPLE) * MULTIPLE


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """The control of a generation: its network, the network's input, and the factor of hints.

    cells: an array of the library, (in_channels, height, width).
    """

    network: Callable[[], Any]  # which may have been released since the last step
    cells: Any
    strength: float

    def hints(self, transformer: Any, latents: Any, time: float, caption: Any) -> Any:
        """Return the hints of a forward pass of the transformer."""
        given = transformer, latents, time, caption
        return self.network()(*given, self.cells, self.strength)


@dataclass(frozen=True, eq=False, kw_only=True)
class ZImageFamily(FlowPipeline):
    """The networks of Z-Image; ``CONTROLNET`` makes a control network.

    ``controls`` opens a control network, None for the model's own; None if it has none.
    """

    CAPTIONING = (
        "text_encoder/",
        *(f"transformer/{one}" for one in ("context_refiner.", "cap_embedder.", "cap_pad_token")),
    )

    CONTROLNET: ClassVar[Callable[..., Any]]

    transformer_module: OffloadedModule[Any, TransformerConfig]
    vae_module: OffloadedModule[Any, VaeConfig]
    controls: Callable[[StoredControlNet | None], ControlModule | None]
    _control: list[ControlModule] = field(default_factory=list)  # the one that is used, or none

    @classmethod
    def parts(cls, components: ModelComponents, request: GenerateRequest | None) -> dict[str, Any]:
        parts = super().parts(components, request)
        own = own_controlnet(components.store, components.aimage)
        config: TransformerConfig = parts["transformer_module"].config

        @lru_cache(maxsize=1)  # another network takes its memory
        def control(stored: StoredControlNet | None) -> ControlModule | None:
            found = stored or own
            if found is None:
                return None
            return open_controlnet(found, config, components, cls.CONTROLNET)

        return {**parts, "controls": control}

    @staticmethod
    def sides_of(transformer: TransformerConfig, vae: VaeConfig) -> Sides:
        multiple = vae.scale * PATCH
        _, rows, columns = transformer.axes_lens
        return Sides(multiple, columns * multiple, rows * multiple)

    @staticmethod
    def check_fit(
        text_encoder: TextEncoderConfig, transformer: TransformerConfig, vae: VaeConfig
    ) -> None:
        features, latents = transformer.cap_feat_dim, transformer.in_channels
        found = text_encoder.hidden_size, vae.latent_channels
        check_channels(found[0], features, found[1], latents, vae.out_channels)

    def weight(self, request: GenerateRequest) -> float:
        return request.guidance

    def lengths(self, request: GenerateRequest) -> tuple[int, int]:
        tokens = max(padded(len(self.tokens(text))) for text in self.texts(request))
        pixels = request.width * request.height
        return tokens, tokens + padded(pixels // self.sides.multiple**2)

    def layer(self) -> tuple[int, int, int]:
        config = self.transformer_module.config
        return config.dim, config.ffn_dim, config.n_heads

    def latent_shape(self, request: GenerateRequest) -> tuple[int, int, int]:
        scale = self.vae_module.config.scale
        channels = self.transformer_module.config.in_channels
        return channels, request.height // scale, request.width // scale

    def normalize(self, latents: Floats) -> Floats:
        config = self.vae_module.config
        shift, scale = np.float32(config.shift_factor), np.float32(config.scaling_factor)
        return (latents - shift) * scale

    def direction(
        self,
        latents: Any,
        time: float,
        caption: Caption,
        pictures: Control | None,
        cache: Any,
    ) -> Any:
        transformer, given = self.transformer, (latents, time, caption)
        hints: Callable[[], Any] = dict
        if pictures is not None:
            hints = partial(pictures.hints, transformer, *given)
        return transformer(*given, cache, hints)

    def beside(self, request: GenerateRequest, length: int) -> tuple[tuple[Module, ...], float]:
        if request.control is None or not self._control:
            return (), 0
        hints = len(self._control[0].config.places) + 1
        config = self.transformer_module.config
        return tuple(self._control), hints * length * config.dim * self.library.itemsize

    @property
    def has_drafts(self) -> bool:
        return has_colours(self.vae_module.config)

    def draft(self, latents: Floats) -> npt.NDArray[np.uint8]:
        """Return a preview of latents; approximated if the factors of the VAE are known."""
        if self.has_drafts:
            return colours(latents, self.vae_module.config.scale // 2)
        return super().draft(latents)

    def use_control(self, stored: StoredControlNet | None) -> None:
        """Use a control network from now on, or the model's own.

        Raises:
            UsageError: The model has none of its own.
            FormatError: The network is of another base model, or damaged.
        """
        found = self.controls(stored)
        if found is None:
            raise UsageError(
                "this model has no ControlNet of its own", hint="name one that fits the model"
            )
        if self._control == [found]:
            return
        found.policy = self.transformer_module.policy
        others = (module for module in self.budget.modules if module not in self._control)
        self.budget.modules = (found, *others)
        self._control[:] = [found]

    def inputs(
        self, request: GenerateRequest, given: PictureInput
    ) -> tuple[EncodedPicture | None, Control | None]:
        """Return the picture to begin with and the control, evaluated.

        A control network that has inputs for the mask paints around it itself: all of the picture
        begins as noise then, unless the strength is below 1. Raises as ``ModelWeights.apply`` does.
        """
        control, is_inside = None, False
        if given.control is not None:
            config = self._control[0].config
            is_inside = given.mask is not None and config.has_mask
            hidden = self._masked(given) if is_inside else None
            found = to_input(config, self.mode(to_values(given.control)), hidden)
            cells = self.library.array(found)
            control = Control(self._control[0].get, cells, request.control_strength or 0.0)
        encoded = None if is_inside and request.strength == 1 else self.encoded(given)
        self.budget.finish(self.picture_encoder())
        return encoded, control

    def _masked(self, given: PictureInput) -> tuple[Floats, Floats]:
        """Return the cells to paint, and the scaled latents of the picture without them."""
        assert given.pixels is not None and given.mask is not None  # noqa: S101 - was checked
        values = to_values(given.pixels) * (given.mask < 128)[..., None]
        return cells_of(given.mask, self.vae_module.config.scale), self.mode(values)

    def ids(self, prompt: str) -> list[int]:
        """Return the checked tokens of a prompt.

        Raises:
            UsageError: The prompt needs more positions than the transformer has.
            ModelError: The tokenizer does not match the text encoder.
        """
        tokens = self.tokens(prompt)
        positions = self.transformer_module.config.axes_lens[0]
        if padded(len(tokens)) + 2 > positions:
            raise UsageError(
                f"the prompt is too long: {len(tokens)} tokens and padding exceed {positions} "
                "positions"
            )
        return super().ids(prompt)

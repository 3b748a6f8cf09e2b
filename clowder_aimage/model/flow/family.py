"""The interface of families of models: their differences, as frozen values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.memory_budget import Module
from clowder_aimage.model.flow.networks import FlowNetworks, NetworkConfigs
from clowder_aimage.model.flow.picture_encoder import PictureEncoder
from clowder_aimage.model.flow.picture_size import Sides
from clowder_aimage.model.flow.picture_start import EncodedPicture
from clowder_aimage.model.flow.scheduler import Schedule
from clowder_aimage.model.pipeline import PictureInput

Pixels = npt.NDArray[np.uint8]


class FlowFamily(NetworkConfigs, Protocol):
    """A model of a family: its configurations and derived values.

    Methods change no state; the arrays are those of any library.
    """

    # Prefixes of the tensors that captions depend on: adapters of others keep cached captions
    CAPTIONING: ClassVar[tuple[str, ...]]
    # The tokens to which texts are padded; None if they are not
    TEXT_LENGTH: ClassVar[int | None]
    # The transformer sees multiples of it, of a text and of a picture
    TOKEN_MULTIPLE: ClassVar[int]

    @property
    def sides(self) -> Sides:
        """Return the sides of pictures that the networks support."""
        ...

    @property
    def layer(self) -> tuple[int, int, int]:
        """Return the width, the hidden channels and the heads of the transformer's layers."""
        ...

    def refuse(self, request: GenerateRequest) -> None:
        """Reject a request with features of other families. Raises UsageError."""
        ...

    def check_length(self, tokens: int) -> None:
        """Reject a prompt of too many tokens. Raises UsageError."""
        ...

    def compute_guidance_weight(self, request: GenerateRequest) -> float:
        """Return the factor of positive - negative velocity; 0 without guidance."""
        ...

    def compute_latent_shape(self, request: GenerateRequest) -> tuple[int, int, int]:
        """Return the shape of the latents: (channels, height, width)."""
        ...

    def schedule(self, steps: int, tokens: int, shift: float | None) -> Schedule:
        """Return the noise levels for a picture of ``tokens`` tokens. Raises UsageError."""
        ...

    def normalize(self, latents: Floats, networks: FlowNetworks) -> Floats:
        """Return latents as the encoder computes them, scaled for the transformer."""
        ...

    def fit(self, pictures: PictureInput) -> PictureInput:
        """Return pictures in the sizes of the family. Raises UsageError: one is unsuitable."""
        ...

    def encode_pictures(
        self,
        request: GenerateRequest,
        pictures: PictureInput,
        encoder: PictureEncoder,
        control: Module | None,
    ) -> tuple[EncodedPicture | None, Any]:
        """Return the picture to begin with, and the conditioning inputs, evaluated.

        ``control`` is the request's control network. Raises as ``ModelWeights.apply`` does.
        """
        ...

    def predict_velocity(
        self, transformer: Any, latents: Any, time: float, caption: Caption, inputs: Any, cache: Any
    ) -> Any:
        """Return the transformer's velocity from noise to picture, for one caption.

        latents, velocity: arrays of the library, (channels, height, width). time: 0 (noise) to 1
        (picture). inputs: from ``encode_pictures``. With a ``cache``, layers may be skipped.
        """
        ...

    def predict_velocities(
        self, transformer: Any, passes: Sequence[tuple[Any, float, Caption]]
    ) -> Sequence[Any]:
        """Return the velocities of several passes, computed at once: latents, time and caption.

        The latents have the same shape.
        """
        ...

    @property
    def draft(self) -> Callable[[Floats], Pixels] | None:
        """Return a function from latents to an approximate preview, at half the size.

        None if previews are decoded.
        """
        ...


def list_texts(family: FlowFamily, request: GenerateRequest) -> list[str]:
    """Return the prompt of a request, and its negative prompt if guidance is on."""
    return [
        request.prompt,
        *([request.guidance.negative or ""] if family.compute_guidance_weight(request) else []),
    ]


def check_channels(text_encoder: int, required: int, vae: int, latents: int, colours: int) -> None:
    """Compare the features of a text encoder and the channels of a vae with a transformer's.

    Raises:
        ModelError: They differ.
    """
    if text_encoder != required:
        raise ModelError(
            f"the text encoder returns {text_encoder} features, the transformer requires {required}"
        )
    if vae != latents:
        raise ModelError(f"the vae has {vae} latent channels, the transformer requires {latents}")
    if colours != 3:
        raise ModelError(f"the vae has {colours} output channels, pictures have 3")


def check_by_family(family: FlowFamily, request: GenerateRequest) -> None:
    """Reject sides and features that a family does not have. Raises UsageError."""
    family.sides.check(request)
    family.refuse(request)

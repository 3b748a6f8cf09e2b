"""FLUX.2 [klein], with networks of any library.

Follows ``Flux2KleinPipeline`` of diffusers 0.42: texts are padded to 512 tokens, and the
transformer attends to the padding; the distilled model has no guidance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.generation.check import build_parameter_error
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.component import read_config
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.family import check_channels
from clowder_aimage.model.flow.memory_budget import Module
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.picture_encoder import PictureEncoder, to_values
from clowder_aimage.model.flow.picture_size import Sides
from clowder_aimage.model.flow.picture_start import EncodedPicture
from clowder_aimage.model.flow.scheduler import FlowScheduler, Schedule
from clowder_aimage.model.flow.tokenizer import MAX_TOKENS
from clowder_aimage.model.flux2.config import PATCH, TransformerConfig, VaeConfig
from clowder_aimage.model.flux2.reference_picture import ReferenceTokens, fit_reference
from clowder_aimage.model.pipeline import PictureInput
from clowder_aimage.tensor.config_fields import ConfigFields

# Layers of the text encoder before the states that are features
STATES = (9, 18, 27)
_MAX_SIDE = 8192


@dataclass(frozen=True, slots=True)
class Flux2:
    """A model of FLUX.2 [klein]. Raises ModelError: its networks do not fit each other."""

    IS_THINKING: ClassVar[bool] = False
    CAPTIONING: ClassVar[tuple[str, ...]] = ("text_encoder/", "transformer/context_embedder.")
    TEXT_LENGTH: ClassVar[int | None] = MAX_TOKENS
    TOKEN_MULTIPLE: ClassVar[int] = 1

    text_encoder: TextEncoderConfig
    transformer: TransformerConfig
    vae: VaeConfig
    scheduler: FlowScheduler
    is_distilled: bool

    def __post_init__(self) -> None:
        text, transformer, vae = self.text_encoder, self.transformer, self.vae
        if text.num_hidden_layers <= max(STATES):
            raise ModelError(
                f"the text encoder has {text.num_hidden_layers} layers, more than "
                f"{max(STATES)} are required"
            )
        features = len(STATES) * text.hidden_size, transformer.joint_attention_dim
        latents = PATCH * PATCH * vae.latent_channels, transformer.in_channels
        check_channels(*features, *latents, vae.out_channels)

    @classmethod
    def read(cls, store: BlobFiles, aimage: AImage) -> Flux2:
        """Read the configurations of a model. Raises ModelError."""
        read = partial(read_config, store, aimage)
        return cls(
            read("text_encoder/config.json", TextEncoderConfig.parse),
            read("transformer/config.json", TransformerConfig.parse),
            read("vae/config.json", VaeConfig.parse),
            read("scheduler/scheduler_config.json", FlowScheduler.parse),
            read("model_index.json", _is_distilled),
        )

    @property
    def sides(self) -> Sides:
        return Sides(PATCH * self.vae.scale, _MAX_SIDE, _MAX_SIDE)

    @property
    def layer(self) -> tuple[int, int, int]:
        return self.transformer.dim, 2 * self.transformer.ffn_dim, self.transformer.heads

    def refuse(self, request: GenerateRequest) -> None:
        if request.input.image is not None:
            raise UsageError(
                "this model does not begin with a picture: it edits reference pictures",
                hint="give the picture as a reference",
                parameter="image",
            )
        if request.control.image is not None:
            raise build_parameter_error(
                "control", "cannot be used: the family of this model has no control networks"
            )
        if self.is_distilled and request.guidance.scale > 1:
            raise build_parameter_error(
                "guidance", "cannot be used: this model is distilled and has none"
            )

    def check_length(self, tokens: int) -> None:
        """Accept all lengths: the tokenizer returns 512 tokens at most."""

    def compute_guidance_weight(self, request: GenerateRequest) -> float:
        """Return the guidance scale minus 1: the reference has no guidance at a scale of 1."""
        return 0.0 if self.is_distilled else max(0.0, request.guidance.scale - 1)

    def compute_latent_shape(self, request: GenerateRequest) -> tuple[int, int, int]:
        multiple = self.sides.multiple
        return (
            self.transformer.in_channels,
            request.sampling.height // multiple,
            request.sampling.width // multiple,
        )

    def schedule(self, steps: int, tokens: int, shift: float | None) -> Schedule:
        return self.scheduler.schedule(steps, tokens, shift, mu=compute_empirical_mu(tokens, steps))

    def normalize(self, latents: Floats, networks: FlowNetworks) -> Floats:
        encoder, library = networks.picture_encoder.get(), networks.library
        return library.to_floats(encoder.normalize(library.to_array(latents)))

    def fit(self, pictures: PictureInput) -> PictureInput:
        multiple = self.sides.multiple
        references = tuple(fit_reference(reference, multiple) for reference in pictures.references)
        return replace(pictures, references=references)

    def encode_pictures(
        self,
        request: GenerateRequest,  # noqa: ARG002 - of the interface
        pictures: PictureInput,
        encoder: PictureEncoder,
        control: Module | None,  # noqa: ARG002 - of the interface
    ) -> tuple[EncodedPicture | None, ReferenceTokens | None]:
        latents = [encoder.encode_mode(to_values(reference)) for reference in pictures.references]
        if not latents:
            return None, None
        encoder.finish()
        inputs = ReferenceTokens.of(latents, encoder.library)
        encoder.library.evaluate(inputs.tokens)
        return None, inputs

    def predict_velocity(
        self,
        transformer: Any,
        latents: Any,
        time: float,
        caption: Caption,
        inputs: ReferenceTokens | None,
        cache: Any,
    ) -> Any:
        # This transformer takes the noise level, and returns the opposite direction
        return -transformer(latents, _to_sigma(time), caption, inputs, cache)

    def predict_velocities(
        self, transformer: Any, passes: Sequence[tuple[Any, float, Caption]]
    ) -> Sequence[Any]:
        inputs = [(latents, _to_sigma(time), caption) for latents, time, caption in passes]
        return [-velocity for velocity in transformer.compute_batch(inputs)]

    @property
    def draft(self) -> None:
        return None


def _to_sigma(time: float) -> float:
    """Return the noise level at a time."""
    return float(np.float32(1) - np.float32(time))


def _is_distilled(name: str, values: Mapping[str, Any]) -> bool:
    return ConfigFields(name, values).get_boolean("is_distilled", False)


def compute_empirical_mu(tokens: int, steps: int) -> float:
    """Return the shift of the noise levels for a picture of ``tokens`` tokens.

    It lies on the line through the measured shifts for 10 and for 200 steps. Source: diffusers,
    pipelines/flux2/pipeline_flux2_klein.py.
    """
    few = 8.73809524e-05 * tokens + 1.89833333
    many = 0.00016927 * tokens + 0.45666666
    return many if tokens > 4300 else many + (many - few) / 190 * (steps - 200)

"""FLUX.2 [klein], with networks of any library.

Follows ``Flux2KleinPipeline`` of diffusers 0.42: texts are padded to 512 tokens, which the
transformer sees; the distilled model has no guidance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.component import ModelComponents
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.family import check_channels
from clowder_aimage.model.flow.flow_scheduler import Schedule
from clowder_aimage.model.flow.memory_budget import OffloadedModule
from clowder_aimage.model.flow.picture_start import EncodedPicture
from clowder_aimage.model.flow.pipeline import FlowPipeline, to_values
from clowder_aimage.model.flow.tokenizer import MAX_TOKENS
from clowder_aimage.model.flux2.config import PATCH, TransformerConfig, VaeConfig
from clowder_aimage.model.flux2.reference_picture import ReferenceTokens, fit_reference
from clowder_aimage.model.pipeline import (
    GenerateRequest,
    PictureInput,
    Sides,
)
from clowder_aimage.model.weights import read_object
from clowder_aimage.tensor.config_fields import ConfigFields

STATES = (9, 18, 27)  # layers of the text encoder before the states that are features
_MAX_SIDE = 8192


@dataclass(frozen=True, eq=False, kw_only=True)
class Flux2Family(FlowPipeline):
    """The networks of FLUX.2 [klein]."""

    CAPTIONING = ("text_encoder/", "transformer/context_embedder.")
    IS_THINKING = False
    SEES_REFERENCES = True

    transformer_module: OffloadedModule[Any, TransformerConfig]
    vae_module: OffloadedModule[Any, VaeConfig]
    is_distilled: bool

    @classmethod
    def parts(cls, components: ModelComponents, request: GenerateRequest | None) -> dict[str, Any]:
        name = "model_index.json"
        index = ConfigFields(name, read_object(components.store, components.aimage, name))
        is_distilled = index.boolean("is_distilled", False)
        return {**super().parts(components, request), "is_distilled": is_distilled}

    @staticmethod
    def sides_of(transformer: TransformerConfig, vae: VaeConfig) -> Sides:  # noqa: ARG004
        return Sides(PATCH * vae.scale, _MAX_SIDE, _MAX_SIDE)

    @staticmethod
    def check_fit(
        text_encoder: TextEncoderConfig, transformer: TransformerConfig, vae: VaeConfig
    ) -> None:
        if text_encoder.num_hidden_layers <= max(STATES):
            raise ModelError(
                f"the text encoder has {text_encoder.num_hidden_layers} layers, more than "
                f"{max(STATES)} are required"
            )
        features = len(STATES) * text_encoder.hidden_size, transformer.joint_attention_dim
        latents = PATCH * PATCH * vae.latent_channels, transformer.in_channels
        check_channels(*features, *latents, vae.out_channels)

    def refuse(self, request: GenerateRequest) -> None:
        super().refuse(request)
        if self.is_distilled and request.guidance > 1:
            raise UsageError("this model is distilled and has no guidance; omit guidance")

    def weight(self, request: GenerateRequest) -> float:
        """Return the guidance scale of the reference without the 1 at which it is off."""
        return 0.0 if self.is_distilled else max(0.0, request.guidance - 1)

    def lengths(self, request: GenerateRequest) -> tuple[int, int]:
        return MAX_TOKENS, MAX_TOKENS + self.area(request) // self.sides.multiple**2

    def layer(self) -> tuple[int, int, int]:
        config = self.transformer_module.config
        return config.dim, 2 * config.ffn_dim, config.heads

    def latent_shape(self, request: GenerateRequest) -> tuple[int, int, int]:
        multiple = self.sides.multiple
        channels = self.transformer_module.config.in_channels
        return channels, request.height // multiple, request.width // multiple

    def normalize(self, latents: Floats) -> Floats:
        encoder = self.picture_encoder().get()
        return self.library.floats(encoder.normalize(self.library.array(latents)))

    def direction(
        self,
        latents: Any,
        time: float,
        caption: Caption,
        pictures: ReferenceTokens | None,
        cache: Any,
    ) -> Any:
        sigma = float(np.float32(1) - np.float32(time))
        return -self.transformer(latents, sigma, caption, pictures, cache)

    def levels(self, steps: int, tokens: int, shift: float | None) -> Schedule:
        return self.scheduler.schedule(steps, tokens, shift, mu=empirical_mu(tokens, steps))

    def encode(self, prompt: str) -> Any:
        """Return the text features of a prompt, (512, channels). Raises as ``ids``."""
        ids = self.ids(prompt)
        padding = [self.tokenizer.padding] * (MAX_TOKENS - len(ids))
        return self.text_encoder(self.library.array(np.array(ids + padding)), len(ids))

    def fit(self, given: PictureInput) -> PictureInput:
        multiple = self.sides.multiple
        references = tuple(fit_reference(one, multiple) for one in given.references)
        return replace(given, references=references)

    def inputs(
        self,
        request: GenerateRequest,  # noqa: ARG002 - of the interface
        given: PictureInput,
    ) -> tuple[EncodedPicture | None, ReferenceTokens | None]:
        latents = [self.mode(to_values(one)) for one in given.references]
        if not latents:
            return None, None
        self.budget.finish(self.picture_encoder())
        found = ReferenceTokens.of(latents, self.library)
        self.library.evaluate(found.tokens)
        return None, found


def empirical_mu(tokens: int, steps: int) -> float:
    """Return the shift of the noise levels for a picture of ``tokens`` tokens.

    It lies on the line through those for 10 and for 200 steps, which were measured. Source:
    diffusers, pipelines/flux2/pipeline_flux2_klein.py.
    """
    few = 8.73809524e-05 * tokens + 1.89833333
    many = 0.00016927 * tokens + 0.45666666
    return many if tokens > 4300 else many + (many - few) / 190 * (steps - 200)

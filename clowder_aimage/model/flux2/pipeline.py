"""The pipeline of FLUX.2 [klein] on MLX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.component import NetworkKind
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.step_cache import StepCache
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.flux2.config import TransformerConfig, VaeConfig
from clowder_aimage.model.flux2.family import STATES, Flux2Family
from clowder_aimage.model.flux2.transformer import ReferenceTokens, Transformer
from clowder_aimage.model.flux2.vae import Vae, VaeEncoder


@dataclass(frozen=True, eq=False, kw_only=True)
class Flux2KleinPipeline(Flux2Family):
    """The networks of FLUX.2 [klein], of MLX."""

    NETWORKS = {  # noqa: RUF012
        "text_encoder": NetworkKind(
            "text_encoder", partial(TextEncoder, outputs=STATES), TextEncoderConfig.parse
        ),
        "transformer": NetworkKind("transformer", Transformer, TransformerConfig.parse),
        "vae": NetworkKind("vae", Vae, VaeConfig.parse),
        "picture_encoder": NetworkKind("vae", VaeEncoder, VaeConfig.parse),
    }

    def step_cache(self, threshold: float) -> StepCache:
        return StepCache(threshold)

    def normalize(self, latents: Floats) -> Floats:
        encoder: VaeEncoder = self.picture_encoder().get()
        return self.library.floats(encoder.normalize(mx.array(latents)))

    def direction(
        self,
        latents: mx.array,
        time: float,
        caption: Caption,
        pictures: ReferenceTokens | None,
        cache: StepCache | None,
    ) -> mx.array:
        sigma = float(np.float32(1) - np.float32(time))
        transformer: Transformer = self.transformer_module.get()
        return -transformer(latents, sigma, caption, pictures, cache)

    def references(self, latents: list[Floats]) -> ReferenceTokens:
        found = ReferenceTokens.of([mx.array(one) for one in latents])
        mx.eval(found.tokens)
        return found

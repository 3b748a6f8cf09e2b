"""The Z-Image pipeline on MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.component import NetworkKind
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.step_cache import StepCache
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.flow.vae import LatentEncoder
from clowder_aimage.model.zimage.config import TransformerConfig, VaeConfig
from clowder_aimage.model.zimage.control import ControlNet
from clowder_aimage.model.zimage.family import Control, ZImageFamily
from clowder_aimage.model.zimage.transformer import Hints, Transformer
from clowder_aimage.model.zimage.vae import Vae


@dataclass(frozen=True, eq=False, kw_only=True)
class ZImagePipeline(ZImageFamily):
    """The networks of Z-Image, of MLX."""

    NETWORKS = {  # noqa: RUF012
        "text_encoder": NetworkKind("text_encoder", TextEncoder, TextEncoderConfig.parse),
        "transformer": NetworkKind("transformer", Transformer, TransformerConfig.parse),
        "vae": NetworkKind("vae", Vae, VaeConfig.parse),
        "picture_encoder": NetworkKind("vae", LatentEncoder, VaeConfig.parse),
    }
    CONTROLNET = ControlNet

    def step_cache(self, threshold: float) -> StepCache:
        return StepCache(threshold)

    def direction(
        self,
        latents: mx.array,
        time: float,
        caption: Caption,
        pictures: Control | None,
        cache: StepCache | None,
    ) -> mx.array:
        transformer: Transformer = self.transformer_module.get()
        given = latents, time, caption
        hints: Callable[[], Hints] = dict
        if pictures:
            hints = partial(pictures.hints, transformer, *given)
        return transformer(*given, cache, hints)

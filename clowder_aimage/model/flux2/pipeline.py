"""The pipeline of FLUX.2 [klein] on MLX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from clowder_aimage.model.flow.component import NetworkKind
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.flux2.config import TransformerConfig, VaeConfig
from clowder_aimage.model.flux2.family import STATES, Flux2Family
from clowder_aimage.model.flux2.transformer import Transformer
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

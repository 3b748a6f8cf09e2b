"""The Z-Image pipeline on MLX."""

from __future__ import annotations

from dataclasses import dataclass

from clowder_aimage.model.flow.component import NetworkKind
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.flow.vae import LatentEncoder
from clowder_aimage.model.zimage.config import TransformerConfig, VaeConfig
from clowder_aimage.model.zimage.control import ControlNet
from clowder_aimage.model.zimage.family import ZImageFamily
from clowder_aimage.model.zimage.transformer import Transformer
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

"""The networks of FLUX.2 [klein] on MLX."""

from __future__ import annotations

from functools import partial

from clowder_aimage.model.flow.component import NetworkKinds
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.flux2.family import STATES
from clowder_aimage.model.flux2.transformer import Transformer
from clowder_aimage.model.flux2.vae import Vae, VaeEncoder

NETWORKS = NetworkKinds(partial(TextEncoder, outputs=STATES), Transformer, Vae, VaeEncoder)

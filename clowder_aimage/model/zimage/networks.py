"""The networks of Z-Image on MLX."""

from __future__ import annotations

from clowder_aimage.model.flow.component import ControlKind, NetworkKinds
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.flow.vae import LatentEncoder
from clowder_aimage.model.zimage.control import ControlNet
from clowder_aimage.model.zimage.control_config import read_control_config
from clowder_aimage.model.zimage.transformer import Transformer
from clowder_aimage.model.zimage.vae import Vae

NETWORKS = NetworkKinds(
    TextEncoder, Transformer, Vae, LatentEncoder, ControlKind(ControlNet, read_control_config)
)

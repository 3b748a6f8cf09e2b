"""The autoencoder of Z-Image: its latents are shifted and scaled by two numbers.

Reference: diffusers, models/autoencoders/autoencoder_kl.py (arXiv 2112.10752).
"""

from __future__ import annotations

from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.vae import LatentDecoder, LatentEncoder
from clowder_aimage.model.zimage.config import VaeConfig


class VaeEncoder(LatentEncoder):
    """The encoder alone."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__(config)
        self.config = config


class Vae(LatentDecoder):
    """The decoder alone."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__(config)
        self.config = config

    def decode(self, latents: mx.array) -> mx.array:
        """Decode latents (channels, height, width) to pixels (scale * height, scale * width, 3).

        Pixels are about -1 to 1, not clipped; the dtype is that of the latents.
        """
        return self.to_pixels(latents / self.config.scaling_factor + self.config.shift_factor)

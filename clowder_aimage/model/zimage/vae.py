"""The autoencoder of Z-Image: its latents are shifted and scaled by two numbers.

Reference: diffusers, models/autoencoders/autoencoder_kl.py (arXiv 2112.10752).
"""

from __future__ import annotations

from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.vae import LatentDecoder


class Vae(LatentDecoder):
    """The decoder alone."""

    def decode(self, latents: mx.array) -> mx.array:
        """Decode latents (channels, height, width) to pixels (scale * height, scale * width, 3).

        Pixels are about -1 to 1, not clipped; the dtype is that of the latents.
        """
        return self.to_pixels(latents / self.config.scaling_factor + self.config.shift_factor)

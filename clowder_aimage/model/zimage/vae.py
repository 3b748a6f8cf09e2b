"""The autoencoder of Z-Image: latents have a ``scaling_factor`` and a ``shift_factor``.

Reference: diffusers, models/autoencoders/autoencoder_kl.py (arXiv 2112.10752).
"""

from __future__ import annotations

from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.vae import LatentDecoder


class Vae(LatentDecoder):
    """The decoder of the autoencoder."""

    def decode(self, latents: mx.array) -> mx.array:
        """Decode latents (channels, height, width) to pixels (scale * height, scale * width, 3).

        ``scale`` is the upsampling of the decoder. Pixels are about -1 to 1, not clipped; the dtype
        is that of the latents.
        """
        return self.to_pixels(latents / self.config.scaling_factor + self.config.shift_factor)

"""The autoencoder of FLUX.2: latents are patches of 2 x 2 cells, normalized channel by channel.

Reference: diffusers, models/autoencoders/autoencoder_kl_flux2.py.
"""

from __future__ import annotations

from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.flow.vae import LatentDecoder, LatentEncoder
from clowder_aimage.model.flux2.config import PATCH, VaeConfig

# A counter of the training
_COUNT = "bn.num_batches_tracked"


class ChannelStatistics(Network):
    """The means and variances of the channels of patches: (channels, height, width)."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        channels = PATCH * PATCH * config.latent_channels
        self.eps = config.batch_norm_eps
        self.running_mean = mx.zeros(channels)
        self.running_var = mx.ones(channels)

    def normalize(self, patches: mx.array) -> mx.array:
        """Return patches with a mean of 0 and a deviation of 1."""
        mean, deviation = self._compute_moments(patches.dtype)
        return (patches - mean) / deviation

    def restore(self, patches: mx.array) -> mx.array:
        """Undo ``normalize``."""
        mean, deviation = self._compute_moments(patches.dtype)
        return patches * deviation + mean

    def _compute_moments(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        mean, variance = self.running_mean[:, None, None], self.running_var[:, None, None]
        return mean.astype(dtype), mx.sqrt(variance.astype(mx.float32) + self.eps).astype(dtype)


class VaeEncoder(LatentEncoder):
    """The encoder alone."""

    OTHERS = (*LatentEncoder.OTHERS, _COUNT)

    def __init__(self, config: VaeConfig) -> None:
        super().__init__(config)
        self.bn = ChannelStatistics(config)

    def normalize(self, cells: mx.array) -> mx.array:
        """Return encoded cells (channels, height, width) as latents: normalized patches."""
        channels, height, width = cells.shape
        rows, columns = height // PATCH, width // PATCH
        patches = cells.reshape(channels, rows, PATCH, columns, PATCH).transpose(0, 2, 4, 1, 3)
        return self.bn.normalize(patches.reshape(-1, rows, columns))


class Vae(LatentDecoder):
    """The decoder alone."""

    OTHERS = (*LatentDecoder.OTHERS, _COUNT)

    def __init__(self, config: VaeConfig) -> None:
        super().__init__(config)
        self.bn = ChannelStatistics(config)

    def decode(self, latents: mx.array) -> mx.array:
        """Decode latents (4 * channels, height, width) to (2 * scale * height, ..., 3).

        Pixels are about -1 to 1, not clipped; the dtype is that of the latents.
        """
        _, rows, columns = latents.shape
        patches = self.bn.restore(latents).reshape(-1, PATCH, PATCH, rows, columns)
        cells = patches.transpose(0, 3, 1, 4, 2).reshape(-1, PATCH * rows, PATCH * columns)
        return self.to_pixels(cells)

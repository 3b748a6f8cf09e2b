"""Colours of latents without a decoder: a linear approximation of one autoencoder.

Each latent cell becomes one pixel. The factors hold for the VAE of FLUX.1, which Z-Image has too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from clowder_aimage.model.zimage.config import VaeConfig

# For each of the 16 channels: red, green, blue. Source: ComfyUI, comfy/latent_formats.py, Flux
_FACTORS = (
    (-0.0346, 0.0244, 0.0681),
    (0.0034, 0.0210, 0.0687),
    (0.0275, -0.0668, -0.0433),
    (-0.0174, 0.0160, 0.0617),
    (0.0859, 0.0721, 0.0329),
    (0.0004, 0.0383, 0.0115),
    (0.0405, 0.0861, 0.0915),
    (-0.0236, -0.0185, -0.0259),
    (-0.0245, 0.0250, 0.1180),
    (0.1008, 0.0755, -0.0421),
    (-0.0515, 0.0201, 0.0011),
    (0.0428, -0.0012, -0.0036),
    (0.0817, 0.0765, 0.0749),
    (-0.1264, -0.0522, -0.1103),
    (-0.0280, -0.0881, -0.0499),
    (-0.1262, -0.0982, -0.0778),
)
_BIAS = (-0.0329, -0.0718, -0.0851)
_WIDTHS = (128, 256, 512, 512)


def has_colours(config: VaeConfig) -> bool:
    """Return True if a VAE has the configuration of FLUX.1's: the factors hold for no other."""
    # The files state them with different precision
    numbers = round(config.scaling_factor, 4), round(config.shift_factor, 4)
    channels = config.latent_channels, config.block_out_channels
    return numbers == (0.3611, 0.1159) and channels == (len(_FACTORS), _WIDTHS)


def to_rgb(latents: npt.NDArray[np.float32], scale: int) -> npt.NDArray[np.uint8]:
    """Return latents (16, height, width), scaled and shifted, as an RGB picture.

    Its sides are ``scale`` times those of the latents; values between cells are interpolated.
    """
    values = np.tensordot(latents, np.array(_FACTORS), axes=(0, 0)) + np.array(_BIAS)
    pixels = (np.clip(np.nan_to_num(values) * 0.5 + 0.5, 0, 1) * 255).round().astype(np.uint8)
    height, width, _ = pixels.shape
    size = width * scale, height * scale
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))

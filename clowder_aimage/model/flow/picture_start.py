"""Generation from a picture: the noisy latents of the first step, and masks.

Source: diffusers 0.42, pipelines/z_image/pipeline_z_image_img2img.py and _inpaint.py. Each picture
of a request equals that of diffusers with its seed alone: the sample of the encoder is drawn first,
then the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import UsageError
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.noise import draw_samples
from clowder_aimage.model.flow.scheduler import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPicture:
    """The distribution of a picture's latents, and the cells (1, height, width) to paint."""

    means: Floats
    deviations: Floats
    cells: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PictureStart:
    """The latents of the first step; ``clean`` and ``noise`` are those of the original picture.

    They are of numpy, or held by a library.
    """

    latents: Any
    clean: Any
    noise: Any
    cells: Any = None

    def hold(self, hold: Callable[[Floats], Any]) -> PictureStart:
        """Return it with numbers that the library of ``hold`` holds."""
        cells = None if self.cells is None else hold(self.cells)
        return PictureStart(hold(self.latents), hold(self.clean), hold(self.noise), cells)

    def keep(self, latents: Any, sigma: float) -> Any:
        """Return latents at a noise level with the unpainted cells of the picture."""
        if self.cells is None:
            return latents
        # The same noise at every step: the unpainted cells stay on one straight line
        noisy = sigma * self.noise + (1 - sigma) * self.clean
        return (1 - self.cells) * noisy + self.cells * latents


def find_painted_cells(mask: npt.NDArray[np.uint8], scale: int) -> Floats:
    """Return 1 for each latent cell to paint: (1, height, width), by its top left pixel.

    Raises:
        UsageError: There is none.
    """
    # As diffusers: nearest-neighbour interpolation takes the top left pixel of each cell
    painted = mask[::scale, ::scale] >= 128
    if not painted.any():
        raise UsageError(
            f"the mask is too small: it covers no cell of {scale} x {scale} pixels",
            hint="paint more of it, or use crop, which enlarges it",
            parameter="mask",
        )
    return painted.astype(np.float32)[None]


def start(
    encoded: EncodedPicture,
    normalize: Callable[[Floats], Floats],
    seed: int,
    schedule: Schedule,
) -> PictureStart:
    """Return the start of a picture by a seed, at the first step of a schedule.

    ``normalize`` scales latents for the transformer.
    """
    # Two draws of one generator, in this order: the seed gives the same picture as diffusers
    sample, drawn = draw_samples(seed, encoded.means.shape, 2)
    clean = normalize(encoded.means + encoded.deviations * sample)
    sigma = float(schedule.sigmas[0])
    latents = sigma * drawn + (1 - sigma) * clean
    return PictureStart(latents, clean, drawn, encoded.cells)

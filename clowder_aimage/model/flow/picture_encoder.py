"""Pictures of requests as latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.flow.array_library import ArrayLibrary, Floats
from clowder_aimage.model.flow.memory_budget import Stage
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.picture_start import EncodedPicture, find_painted_cells
from clowder_aimage.model.pipeline import PictureInput


@dataclass(frozen=True, slots=True, eq=False)
class PictureEncoder:
    """The picture encoder of a model, loaded on use; ``normalize`` is the family's."""

    networks: FlowNetworks
    normalize: Callable[[Floats, FlowNetworks], Floats]

    @property
    def library(self) -> ArrayLibrary:
        """Return the library of its arrays."""
        return self.networks.library

    def plan(self, pixels: int) -> Stage:
        """Return the stage for pictures of ``pixels`` pixels, with an estimate of the memory."""
        module = self.networks.picture_encoder
        guess = self.library.estimate_decoding_memory(module.config.widest, pixels)
        return Stage(
            "picture", (module,), self.networks.budget.estimate_work("picture", pixels, guess)
        )

    def encode_distribution(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the means and deviations of the latents of a picture: values from -1 to 1."""
        pixels, budget = values.size // 3, self.networks.budget
        budget.use(stage := self.plan(pixels))
        with budget.measure(stage, pixels):
            encode = self.networks.picture_encoder.get().encode
            means, deviations = map(self.library.to_floats, encode(self.library.to_array(values)))
        return means, deviations

    def encode_mode(self, values: Floats) -> Floats:
        """Return the normalized mode of the latents of a picture: (channels, height, width)."""
        return self.normalize(self.encode_distribution(values)[0], self.networks)

    def begin(self, pictures: PictureInput) -> EncodedPicture | None:
        """Return the latent distribution of the picture to begin with; None without a picture."""
        if pictures.pixels is None:
            return None
        means, deviations = self.encode_distribution(to_values(pictures.pixels))
        scale, mask = self.networks.vae.config.scale, pictures.mask
        return EncodedPicture(
            means, deviations, None if mask is None else find_painted_cells(mask, scale)
        )

    def finish(self) -> None:
        """Release the encoder, if no request follows."""
        self.networks.budget.finish(self.networks.picture_encoder)


def to_values(pixels: npt.NDArray[np.uint8]) -> Floats:
    """Return pixels as values from -1 to 1, in float32."""
    return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)

"""The steps of a picture: from noise to latents, with guidance and a cache of steps.

Both directions of guidance are passes of their own: on a CPU two at once took 0.93 of the time of
two, with twice the memory. Latents are float32 between steps, held by the library
(``ArrayLibrary.hold``), with any dtype of the networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.array_library import ArrayLibrary, Floats
from clowder_aimage.model.flow.conditioning import Conditioning
from clowder_aimage.model.flow.family import FlowFamily
from clowder_aimage.model.flow.forward_pass import ForwardPass
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.noise import randn
from clowder_aimage.model.flow.picture_start import EncodedPicture, start
from clowder_aimage.model.flow.pixels import downsample
from clowder_aimage.model.flow.scheduler import Schedule

# Numbers that the library holds
Held = Any
# Changes latents at a noise level
Keep = Callable[[Held, float], Held]
# Of the positive and the negative caption
Caches = tuple[Any, Any]
_NO_CACHES: Caches = (None, None)


class Drawing:
    """A picture between noise and latents: ``latents`` after the steps that were taken.

    A step is the computation of the passes of ``list_passes``, then ``take_step``. ``before`` are
    the latents before the last step.
    """

    def __init__(
        self,
        library: ArrayLibrary,
        latents: Held | Floats,
        schedule: Schedule,
        conditioning: Conditioning,
        threshold: float = 0.0,
        keep: Keep = lambda latents, _: latents,
    ) -> None:
        """Begin with latents, or noise.

        With a ``threshold``, steps between the first and the last may reuse earlier results.
        ``keep`` changes the latents after each step, at its noise level.
        """
        self._library, self._conditioning, self._keep = library, conditioning, keep
        self.schedule, self.total, self.count = schedule, len(schedule.times), 0
        self.latents = self.before = library.hold(latents)
        self._caches, self._passes = _NO_CACHES, list[ForwardPass]()
        # One cache for each direction: their residuals differ
        if threshold:
            self._caches = library.step_cache(threshold), library.step_cache(threshold)

    @property
    def is_done(self) -> bool:
        return self.count == self.total

    def list_passes(self) -> list[ForwardPass]:
        """Return the passes of the next step: for the caption, and for the negative one."""
        conditioning, time = self._conditioning, float(self.schedule.times[self.count])
        # The last step decides the details, and is always computed
        caches = self._caches if self.count < self.total - 1 else _NO_CACHES
        inputs = conditioning.inputs
        self._passes = [ForwardPass(self.latents, time, conditioning.positive, inputs, caches[0])]
        if conditioning.negative is not None and time <= conditioning.end:
            self._passes.append(
                ForwardPass(self.latents, time, conditioning.negative, inputs, caches[1])
            )
        return self._passes

    def take_step(self) -> None:
        """Take the Euler step of passes that were computed."""
        sigmas = self.schedule.sigmas
        change = float(sigmas[self.count + 1] - sigmas[self.count])
        self.before = self.latents
        latents = self.latents - change * self._compute_velocity()
        self._passes = []
        self.count += 1
        self.latents = self._keep(latents, float(sigmas[self.count]))

    def _compute_velocity(self) -> Held:
        """Return the direction from noise to picture, held by the library.

        With guidance it is positive + weight * (positive - negative).
        """
        conditioning, library = self._conditioning, self._library
        towards, *others = (each.velocity for each in self._passes)
        if not others:
            return towards
        guided = towards + float(conditioning.weight) * (towards - others[0])
        if not conditioning.normalization:
            return guided
        length = conditioning.normalization * library.measure(towards)
        return library.limit_length(guided, length)


@dataclass(frozen=True, slots=True, eq=False)
class Denoiser:
    """The pictures of a model, from noise on."""

    family: FlowFamily
    networks: FlowNetworks

    def draw_noise(self, request: GenerateRequest, seed: int) -> Floats:
        """Return noise equal to that of torch, (channels, height, width)."""
        return randn(seed, self.family.compute_latent_shape(request))

    def begin(
        self,
        request: GenerateRequest,
        encoded: EncodedPicture | None,
        schedule: Schedule,
        conditioning: Conditioning,
        seed: int,
    ) -> Drawing:
        """Return a picture of a request before its first step.

        Unpainted cells are restored after each step.
        """
        library, threshold = self.networks.library, request.sampling.cache_threshold
        if encoded is None:
            noise = self.draw_noise(request, seed)
            return Drawing(library, noise, schedule, conditioning, threshold)
        normalize = partial(self.family.normalize, networks=self.networks)
        picture_start = start(encoded, normalize, seed, schedule).hold(library.hold)
        latents, keep = picture_start.latents, picture_start.keep
        return Drawing(library, latents, schedule, conditioning, threshold, keep)

    def preview(
        self, before: Held, after: Held, schedule: Schedule, step: int
    ) -> npt.NDArray[np.uint8]:
        """Return the picture predicted at step ``step`` (from 0), at half its size.

        It shows the end of the straight line from ``before`` through ``after``: decoded, or
        approximated with the factors of a known VAE.
        """
        sigma, lower = float(schedule.sigmas[step]), float(schedule.sigmas[step + 1])
        end = float(schedule.sigmas[-1])
        predicted = before + (after - before) * ((sigma - end) / (sigma - lower))
        if self.family.draft is not None:
            return self.family.draft(self.networks.library.to_floats(predicted))
        # smaller latents could change the colours
        return downsample(self.networks.decode(predicted))


def plan_previews(previews: int, steps: int) -> frozenset[int]:
    """Return the steps followed by a preview: evenly spaced, never the last one."""
    after = (round((k + 1) * steps / (previews + 1)) for k in range(previews))
    return frozenset(step for step in after if 0 < step < steps)

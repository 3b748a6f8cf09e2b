"""The time that a request may compute, from its turn on.

A text has a fixed time. A picture has a multiple of its estimated time, which follows from earlier
pictures of the model and from its own steps.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable

from clowder_aimage.engine.admission import FOR_EVER, ComputeDeadlineError
from clowder_aimage.generation.request import GenerateRequest

# Seconds of a picture at least, and of one whose time cannot be estimated yet
_LEAST, _UNMEASURED = 600.0, 3600.0
_MODELS = 100


class ComputeDeadline:
    """Interrupts a request that computes for too long. ``computed``: the seconds so far."""

    def __init__(self, interrupt: Callable[[ComputeDeadlineError], None], computed: float) -> None:
        self._interrupt, self._loop = interrupt, asyncio.get_running_loop()
        self._begin = self._loop.time() - computed
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, subject: str, advice: str) -> None:
        """Set or change the time of the request. ``subject`` and ``advice`` are for the error."""
        self.cancel()
        if seconds != FOR_EVER:
            error = ComputeDeadlineError(
                f"the {subject} has been computed for {seconds:g} seconds, its limit; {advice}"
            )
            self._timer = self._loop.call_at(self._begin + seconds, self._interrupt, error)

    def cancel(self) -> None:
        """Remove the limit."""
        if self._timer is not None:
            self._timer.cancel()


class PictureTimes:
    """The measured times of the models' pictures, for estimates of others."""

    def __init__(self) -> None:
        # Seconds per step and pixel; the last model was used last
        self._rates: OrderedDict[Hashable, float] = OrderedDict()

    def observe(self, model: Hashable, request: GenerateRequest, seconds: float) -> None:
        """Count the pictures of a request; later ones weigh more."""
        rate = seconds / _compute_work(request)
        self._rates[model] = 0.7 * self._rates.get(model, rate) + 0.3 * rate
        self._rates.move_to_end(model)
        if len(self._rates) > _MODELS:
            self._rates.popitem(last=False)

    def estimate(self, model: Hashable, request: GenerateRequest) -> float:
        """Return the estimated seconds of a request, 0 if the model has made no picture yet."""
        return self._rates.get(model, 0.0) * _compute_work(request)


def compute_picture_limit(factor: float, estimate: float) -> float:
    """Return the seconds that a request for pictures may compute.

    factor: times the estimated seconds; 0 for no limit. estimate: 0 if unknown.
    """
    if not factor:
        return FOR_EVER
    return max(_LEAST, round(factor * estimate)) if estimate else _UNMEASURED


def _compute_work(request: GenerateRequest) -> float:
    sampling = request.sampling
    return float(sampling.steps * sampling.width * sampling.height * request.output.n)

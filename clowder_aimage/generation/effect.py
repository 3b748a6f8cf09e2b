"""Explicit parameters of a request without an effect, as sentences."""

from __future__ import annotations

import math
from collections.abc import Collection

from clowder_aimage.generation.request import GenerateRequest, compute_first_step


def describe_ignored_parameters(request: GenerateRequest, explicit: Collection[str]) -> list[str]:
    """Return a sentence for each of the ``explicit`` parameters that has no effect in a request."""
    ignored = [reason] if (reason := describe_ignored_image(request)) else []
    if not request.guidance.scale:
        names = [name for name in ("guidance_end", "cfg_normalization") if name in explicit]
        ignored += [f"{name} has no effect without guidance" for name in names]
    if request.control.strength == 0:
        ignored.append("control_strength 0 ignores the control picture")
    return ignored


def compute_schedule_steps(steps: int, strength: float) -> int:
    """Return the steps of a schedule whose last ``steps`` are done with ``fine``."""
    return max(steps, round(steps / strength))


def describe_ignored_image(request: GenerateRequest) -> str:
    """Return the reason that the image of a request has no effect, with a remedy, or "".

    It is so if the first step begins at full noise. With a mask, the rest of the image is kept.
    """
    steps, image_input = request.sampling.steps, request.input
    if (
        image_input.image is None
        or not image_input.strength
        or image_input.mask is not None
        or image_input.expand
    ):
        return ""
    if image_input.fine:
        is_ignored = compute_schedule_steps(steps, image_input.strength) == steps
    else:
        is_ignored = compute_first_step(steps, image_input.strength) == 0
    if not is_ignored:
        return ""
    least = (steps - 1) / steps if not image_input.fine else steps / (steps + 1)
    alternative = "more steps" if image_input.fine else "more steps, or fine"
    lower = f"a strength of at most {math.floor(least * 100) / 100:g}" if least else ""
    joint = " or " if image_input.fine else ", "
    lower += joint if lower else ""
    return (
        f"strength {image_input.strength:g} with steps {steps} begins at full noise, so the image "
        f"is ignored; use {lower}{alternative}"
    )

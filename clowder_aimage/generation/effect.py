"""Parameters of a request that change nothing, in words for those who gave them."""

from __future__ import annotations

import math
from collections.abc import Collection

from clowder_aimage.generation.request import GenerateRequest, first_step


def ignored_parameters(request: GenerateRequest, explicit: Collection[str]) -> list[str]:
    """Return a sentence for each of the ``explicit`` parameters that has no effect in a request."""
    ignored = [reason] if (reason := ignored_image(request)) else []
    if not request.guidance.scale:
        names = [name for name in ("guidance_end", "cfg_normalization") if name in explicit]
        ignored += [f"{name} has no effect without guidance" for name in names]
    if request.control.strength == 0:
        ignored.append("control_strength 0 ignores the control picture")
    return ignored


def whole_steps(steps: int, strength: float) -> int:
    """Return the steps of the schedule of which the last ``steps`` are done with ``fine``."""
    return max(steps, round(steps / strength))


def ignored_image(request: GenerateRequest) -> str:
    """Return why the image of a request has no effect, and what to use; else the empty text.

    It is so if the first step begins at full noise. With a mask, the rest of the image is kept.
    """
    steps, own = request.sampling.steps, request.input
    if own.image is None or not own.strength or own.mask is not None or own.expand:
        return ""
    if own.fine:
        is_ignored = whole_steps(steps, own.strength) == steps
    else:
        is_ignored = first_step(steps, own.strength) == 0
    if not is_ignored:
        return ""
    least = (steps - 1) / steps if not own.fine else steps / (steps + 1)
    other = "more steps" if own.fine else "more steps, or fine"
    lower = f"a strength of at most {math.floor(least * 100) / 100:g}" if least else ""
    lower += (" or " if own.fine else ", ") if lower else ""
    return (
        f"strength {own.strength:g} with steps {steps} begins at full noise, so the image is "
        f"ignored; use {lower}{other}"
    )

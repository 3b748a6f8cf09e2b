"""Parameters of a request that change nothing, in words for those who gave them."""

from __future__ import annotations

from collections.abc import Collection

from clowder_aimage.model.pipeline import GenerateRequest, ignored_image

_OF_GUIDANCE = ("guidance_end", "cfg_normalization")


def without_effect(request: GenerateRequest, given: Collection[str]) -> list[str]:
    """Return a sentence for each of the parameters ``given`` that has no effect in a request."""
    found = [reason] if (reason := ignored_image(request)) else []
    if not request.guidance:
        names = [name for name in _OF_GUIDANCE if name in given]
        found += [f"{name} has no effect without guidance" for name in names]
    if request.control is not None and request.control_strength == 0:
        found.append("control_strength 0 ignores the control picture")
    return found

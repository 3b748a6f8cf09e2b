"""The fields of a request that set guidance, the schedule of noise, and cached steps."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from clowder_aimage.api.request_body import RequestBody, wrong
from clowder_aimage.model.pipeline import MAX_SCALE, MAX_THRESHOLD, GenerateRequest

MAX_TEXT = 32_000  # characters of a prompt
MAX_GUIDANCE = 1000
SHIFTS = (0.001, 1000)  # outside of these bounds there is only one noise level
_SAME = ("guidance", "guidance_end", "cfg_normalization", "shift", "cache_threshold")
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]


class GuidanceFields(RequestBody):
    """The guidance and the noise of a request; None leaves them to the AImage."""

    negative_prompt: str = Field(default="", max_length=MAX_TEXT)
    guidance: Guidance | None = None
    guidance_end: float | None = Field(default=None, ge=0, le=1)
    cfg_normalization: float | None = Field(default=None, ge=0, le=MAX_SCALE)
    shift: float | None = Field(default=None, ge=SHIFTS[0], le=SHIFTS[1])
    cache_threshold: float | None = Field(default=None, ge=0, le=MAX_THRESHOLD)

    def of_guidance(self) -> dict[str, Any]:
        """Return the parameters of a generation."""
        return {"negative": self.negative_prompt or None} | {
            name: getattr(self, name) for name in _SAME
        }

    def check_negative(self, request: GenerateRequest) -> None:
        """Refuse a negative prompt that has no effect. Raises ApiError."""
        if self.negative_prompt and not request.guidance:
            raise wrong("negative_prompt", "requires guidance above 0")

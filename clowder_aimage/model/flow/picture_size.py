"""The sizes of pictures that a model and a machine support."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.errors import UsageError
from clowder_aimage.generation.check import build_parameter_error
from clowder_aimage.generation.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class Sides:
    """The supported sides in pixels: multiples of ``multiple`` up to the limits."""

    multiple: int
    max_width: int
    max_height: int

    def check(self, request: GenerateRequest) -> None:
        """Reject a request with other sides. Raises UsageError."""
        for name, side, longest in (
            ("width", request.sampling.width, self.max_width),
            ("height", request.sampling.height, self.max_height),
        ):
            if side < self.multiple or side % self.multiple:
                raise build_parameter_error(
                    name, f"must be a multiple of {self.multiple} pixels, not {side}"
                )
            if side > longest:
                raise build_parameter_error(
                    name, f"must be at most {longest} pixels with this model, not {side}"
                )


def check_arrays(
    request: GenerateRequest,
    sides: Sides,
    needs: Callable[[int, int], int],
    limit: int | None,
) -> None:
    """Reject a request for pictures whose arrays are too large. Raises UsageError with the bound.

    ``needs`` returns the least bytes for a width and a height; ``limit`` bounds them.
    """
    if limit is None:
        return
    # MLX raises no error on a failed allocation: it ends the process
    width, height = request.sampling.width, request.sampling.height
    if (needed := needs(width, height)) <= limit:
        return
    side = math.isqrt(width * height) // sides.multiple * sides.multiple
    while side and needs(side, side) > limit:
        side -= sides.multiple
    example = f", such as {side}x{side}" if side else ""
    raise UsageError(
        f"width {width} and height {height} are too large for this machine: "
        f"at least {_format_gib(needed)} of memory required, {_format_gib(limit)} available",
        hint=f"use a smaller size{example}",
        parameter="width" if width >= height else "height",
    )


def _format_gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

"""The facts of a picture file, and its limits; a worker without numpy knows them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clowder_aimage.oci import Descriptor

TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
MAX_BYTES = 64 << 20  # of a file
MULTIPLE = 16  # pixels, of the sides of most models


@dataclass(frozen=True, slots=True)
class InputFile:
    """A picture file: its digest, type, and size in pixels after rotation."""

    descriptor: Descriptor
    width: int
    height: int


def own_size(picture: InputFile, expand: Sequence[int] = ()) -> dict[str, int]:
    """Return the sides of a request for a picture: rounded down, or up if it is expanded."""
    width, height = picture.width, picture.height
    if expand:
        width, height = expanded_size(width, height, expand, MULTIPLE)
    sides = (max(MULTIPLE, side - side % MULTIPLE) for side in (width, height))
    return dict(zip(("width", "height"), sides, strict=True))


def expanded_size(width: int, height: int, expand: Sequence[int], multiple: int) -> tuple[int, int]:
    """Return the width and height of an expanded picture, rounded up to multiples."""
    left, top, right, bottom = expand
    across, down = left + width + right, top + height + bottom
    return -(-across // multiple) * multiple, -(-down // multiple) * multiple

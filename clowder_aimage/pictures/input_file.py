"""The facts of a picture file, and its limits; a worker without numpy knows them too."""

from __future__ import annotations

from dataclasses import dataclass

from clowder_aimage.oci import Descriptor

TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
MAX_BYTES = 64 << 20  # of a file


@dataclass(frozen=True, slots=True)
class InputFile:
    """A picture file: its digest, type, and size in pixels after rotation."""

    descriptor: Descriptor
    width: int
    height: int

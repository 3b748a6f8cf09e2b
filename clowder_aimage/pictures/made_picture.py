"""A picture that was generated, as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clowder_aimage.oci import Descriptor, mediatype

_SUFFIXES = {"png": "png", "jpeg": "jpg", "webp": "webp"}


@dataclass(frozen=True, slots=True, eq=False)
class MadePicture:
    """A picture file of a kind (png, jpeg, webp), its seed, and how it was made."""

    data: bytes
    seed: int
    kind: str
    facts: Mapping[str, Any] = field(repr=False)

    @property
    def layer(self) -> Descriptor:
        """Return its descriptor, titled with the seed."""
        title = f"{self.seed}.{_SUFFIXES[self.kind]}"
        found = Descriptor.of(f"image/{self.kind}", self.data)
        return replace(found, annotations={mediatype.TITLE: title})

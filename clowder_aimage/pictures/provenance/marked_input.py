"""A picture that a request began with, and what its file says about its origin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clowder_aimage.model.picture_mark import PictureMark

Role = Literal["image", "reference", "control"]


@dataclass(frozen=True, slots=True)
class MarkedInput:
    """A picture file that a request began with, its role there, and its mark if it has one.

    has_manifest: it has a manifest of C2PA; keeps_manifest: which a signed result keeps.
    """

    role: Role
    path: Path
    mark: PictureMark | None = None
    has_manifest: bool = False
    keeps_manifest: bool = False

    @property
    def is_part(self) -> bool:
        """Return True if the result shows it; a control picture only guides the model."""
        return self.role != "control"

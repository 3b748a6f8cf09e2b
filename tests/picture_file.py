"""Picture files of tests: their pixels, and how they were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clowder_aimage.model.picture import Pixels, build_metadata_error, read_picture
from clowder_aimage.model.picture_file import read_file


def load_picture(path: Path) -> tuple[Pixels, dict[str, Any]]:
    """Return the pixels and the facts of a file. Raises UsageError: it has none."""
    found = read_picture(read_file(path), str(path))
    if not found.metadata:
        raise build_metadata_error(str(path))
    return found.pixels, found.metadata

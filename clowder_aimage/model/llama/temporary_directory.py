"""Directories for the files of a process, which need a place that can be written."""

from __future__ import annotations

import tempfile

from clowder_aimage.errors import StoreError


def create_temporary_directory(place: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """Create a directory that is removed with its context; by default in that of the system.

    Raises StoreError: it cannot be written, as on a read-only root without a /tmp.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="aimage-", dir=place)
    except OSError as error:
        raise StoreError(
            f"cannot create a temporary directory: {error.strerror or error}",
            hint="name a directory that can be written in the variable TMPDIR",
        ) from None

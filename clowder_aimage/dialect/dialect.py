"""The interface of all dialects."""

from __future__ import annotations

from typing import Protocol

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.oci import Manifest


class Dialect(Protocol):
    """A way to write an AImage; ``write(read(m, c))`` keeps every blob's digest."""

    @property
    def name(self) -> str: ...

    def matches(self, manifest: Manifest) -> bool:
        """Return whether ``manifest`` is in this dialect."""
        ...

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        """Return the AImage of a manifest and the bytes of its config. Raises FormatError."""
        ...

    def write(self, aimage: AImage, /) -> tuple[Manifest, bytes]:
        """Return the manifest and the config bytes of ``aimage``, the same for the same one.

        Raises:
            UsageError: this dialect is only read.
            FormatError: the AImage cannot be written in it.
        """
        ...

"""What every dialect can do."""

from __future__ import annotations

from typing import Protocol

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.oci import Manifest


class Dialect(Protocol):
    """One way to write an AImage down. ``write(read(m, c))`` keeps every blob's digest."""

    @property
    def name(self) -> str: ...

    def matches(self, manifest: Manifest) -> bool:
        """Whether ``manifest`` is in this dialect."""
        ...

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        """The AImage that a manifest and the bytes of its config describe. Raises FormatError."""
        ...

    def write(self, aimage: AImage) -> tuple[Manifest, bytes]:
        """The manifest and the config bytes for ``aimage``, always the same for the same one.

        Raises:
            UsageError: this dialect is only read.
            FormatError: the AImage cannot be written in it.
        """
        ...

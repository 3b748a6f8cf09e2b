"""The bytes of an AImage's layers, in a store that is only read.

A tool that copies container images may have compressed layers on the way. Such a layer is not there
as the AImage names it: it is unpacked while it is read, however often that is.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

from clowder_aimage.content import ContentStore
from clowder_aimage.content.decompress import open_plain
from clowder_aimage.oci import Descriptor


class LayerStore:
    """The blobs in ``store``.

    ``packed`` are those that came compressed, and what they stand for.
    """

    def __init__(
        self, store: ContentStore, packed: Iterable[tuple[Descriptor, Descriptor]] = ()
    ) -> None:
        self._store = store
        self._came = {plain.digest: came for came, plain in packed}

    def open(self, content: Descriptor, /) -> BinaryIO:
        """Return the bytes of a blob, from the first one on; those that are unpacked are verified.

        Raises:
            NotFoundError: it is not in the store.
            UsageError: it came compressed with zstd, and the package for that is not installed.
        """
        came = self._came.get(content.digest)
        if came is None:
            return self._store.open(content)
        plain = open_plain(self._store, came, content)
        return io.BufferedReader(
            cast(io.RawIOBase, plain)
        )  # which reads as much as it is asked for

    def path(self, content: Descriptor, /) -> Path:
        """Return the file that the blob's bytes come from. Raises NotFoundError."""
        return self._store.path(self._came.get(content.digest, content))

    def is_there(self, content: Descriptor) -> bool:
        """Return whether that file is the blob itself."""
        return content.digest not in self._came

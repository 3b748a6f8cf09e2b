"""Read access to the bytes of an AImage's layers in a store.

Layers compressed by a container image tool are decompressed on reading.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from clowder_aimage.content import ContentStore
from clowder_aimage.content.decompress import open_decompressed
from clowder_aimage.content.store import Reader
from clowder_aimage.dialect import Layer
from clowder_aimage.dialect.ollama import CARRIED_CONFIG
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.oci import Descriptor


class LayerStore:
    """The blobs in ``store``.

    ``packed`` has pairs of a compressed blob and its content.
    """

    def __init__(
        self, store: ContentStore, packed: Iterable[tuple[Descriptor, Descriptor]] = ()
    ) -> None:
        self._store = store
        self._blobs = {plain.digest: blob for blob, plain in packed}

    def open(self, content: Descriptor, /) -> Reader:
        """Open a blob for reading; decompressed contents are verified.

        Raises:
            NotFoundError: It is not in the store.
            UsageError: It is compressed with zstd, and the package zstandard is not installed.
        """
        blob = self._blobs.get(content.digest)
        if blob is None:
            return self._store.open(content)
        plain = open_decompressed(self._store, blob, content)
        # A buffered reader fills each read completely.
        return io.BufferedReader(plain)

    def read(self, layer: Layer, limit: int) -> bytes:
        """Return the content of a layer, of at most ``limit`` bytes. Raises as ``open``."""
        with open_decompressed(self, layer.descriptor, layer.content, limit=limit) as file:
            return b"".join(iter(lambda: file.read(1 << 20), b""))

    def find_path(self, content: Descriptor, /) -> Path:
        """Return the file of the blob, compressed or not. Raises NotFoundError."""
        return self._store.find_path(self._blobs.get(content.digest, content))

    def is_stored(self, content: Descriptor) -> bool:
        """Return True if the store has the blob itself, not a compressed form."""
        return content.digest not in self._blobs


def is_ours(stored: StoredAImage) -> bool:
    """Return True if this project packed the AImage, by its config."""
    if stored.dialect.name == "modelpack":
        return CARRIED_CONFIG in stored.manifest.annotations
    return stored.dialect.name not in ("docker", "kitops")


def is_gathered(layer: Layer) -> bool:
    """Return True for a tensor or a group of experts, False for a whole file."""
    return layer.is_tensor and not layer.name.endswith(".safetensors")

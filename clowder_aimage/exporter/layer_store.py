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
from clowder_aimage.oci import Descriptor, mediatype


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


_TAR, _RAW = ".tar", ".raw"
# Media types of whole files (docs/format.md, Media types): adapters and models.
_FILES = frozenset(
    {
        mediatype.AIMAGE_SAFETENSORS,
        mediatype.AIMAGE_FILE,
        mediatype.AIMAGE_HEADER,
        mediatype.AIMAGE_GGUF,
        mediatype.AIMAGE_ONNX,
        mediatype.AIMAGE_TORCHSCRIPT,
        mediatype.AIMAGE_SAVEDMODEL,
        mediatype.AIMAGE_TRANSFORMERS,
        mediatype.AIMAGE_LORA,
    }
)
# Media types of tars and raw files of ModelPack (and before the CNCF), KitOps and Docker Model
# Runner; the dialects of those names cite the specifications.
_NEIGHBOURS = (
    "application/vnd.cncf.model.",
    "application/vnd.cnai.model.",
    "application/vnd.kitops.modelkit.",
    "application/vnd.docker.ai.",
)


def is_ours(stored: StoredAImage) -> bool:
    """Return True if this project packed the AImage, by its config."""
    if stored.dialect.name == "modelpack":
        return CARRIED_CONFIG in stored.manifest.annotations
    return stored.dialect.name not in ("docker", "kitops")


def is_gathered(layer: Layer) -> bool:
    """Return True for a tensor or a group of experts, False for a whole file."""
    return layer.is_tensor and not layer.name.endswith(".safetensors")


def is_tar(layer: Layer) -> bool:
    """Return True for a tar of another packaging tool."""
    plain, _ = mediatype.split_compression(layer.descriptor.media_type)
    return plain.startswith(_NEIGHBOURS) and plain.endswith(_TAR)


def is_packed(layer: Layer) -> bool:
    """Return True for a file compressed at packing.

    It is a file of this project, a raw file, or a file with its uncompressed digest in the
    manifest.
    """
    plain, compression = mediatype.split_compression(layer.descriptor.media_type)
    if not compression or is_tar(layer):
        return False
    is_raw = plain.startswith(_NEIGHBOURS) and plain.endswith(_RAW)
    return layer.content is not None or plain in _FILES or is_raw

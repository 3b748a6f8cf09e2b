"""Read access to the bytes of an AImage's layers in a store.

A layer that was compressed by a container image tool is decompressed as it is read.
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

    ``packed`` maps compressed blobs to the contents that they represent.
    """

    def __init__(
        self, store: ContentStore, packed: Iterable[tuple[Descriptor, Descriptor]] = ()
    ) -> None:
        self._store = store
        self._came = {plain.digest: came for came, plain in packed}

    def open(self, content: Descriptor, /) -> Reader:
        """Open a blob for reading; decompressed contents are verified.

        Raises:
            NotFoundError: It is not in the store.
            UsageError: It is compressed with zstd, and the package for that is not installed.
        """
        came = self._came.get(content.digest)
        if came is None:
            return self._store.open(content)
        plain = open_decompressed(self._store, came, content)
        return io.BufferedReader(plain)  # fills each read completely

    def read(self, layer: Layer, limit: int) -> bytes:
        """Return the content of a layer, of at most ``limit`` bytes. Raises as ``open``."""
        with open_decompressed(self, layer.descriptor, layer.content, limit=limit) as file:
            return b"".join(iter(lambda: file.read(1 << 20), b""))

    def path(self, content: Descriptor, /) -> Path:
        """Return the file that the blob's bytes come from. Raises NotFoundError."""
        return self._store.path(self._came.get(content.digest, content))

    def is_there(self, content: Descriptor) -> bool:
        """Return whether that file is the blob itself."""
        return content.digest not in self._came


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
    """Return whether the AImage was packed by this project, judged by its config."""
    if stored.dialect.name == "modelpack":
        return CARRIED_CONFIG in stored.manifest.annotations
    return stored.dialect.name not in ("docker", "kitops")


def is_gathered(layer: Layer) -> bool:
    """Return whether it is a tensor or a group of experts, and not a whole file."""
    return layer.is_tensor and not layer.name.endswith(".safetensors")


def is_tar(layer: Layer) -> bool:
    """Return whether it is a tar of another packaging tool."""
    plain, _ = mediatype.split_compression(layer.descriptor.media_type)
    return plain.startswith(_NEIGHBOURS) and plain.endswith(_TAR)


def is_packed(layer: Layer) -> bool:
    """Return whether it is a file that was compressed when it was packed.

    It is a file of this project, a raw file, or one whose uncompressed digest is in the manifest.
    """
    plain, compression = mediatype.split_compression(layer.descriptor.media_type)
    if not compression or is_tar(layer):
        return False
    is_raw = plain.startswith(_NEIGHBOURS) and plain.endswith(_RAW)
    return layer.content is not None or plain in _FILES or is_raw

"""The bytes of an AImage's layers, in a store that is only read.

A layer that a tool for container images has compressed on the way is unpacked while it is read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

from clowder_aimage.content import ContentStore
from clowder_aimage.content.decompress import open_plain
from clowder_aimage.dialect import Layer
from clowder_aimage.dialect.ollama import CARRIED_CONFIG
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.oci import Descriptor, mediatype


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
        plain = cast(io.RawIOBase, open_plain(self._store, came, content))
        return io.BufferedReader(plain)  # which reads as much as it is asked for

    def path(self, content: Descriptor, /) -> Path:
        """Return the file that the blob's bytes come from. Raises NotFoundError."""
        return self._store.path(self._came.get(content.digest, content))

    def is_there(self, content: Descriptor) -> bool:
        """Return whether that file is the blob itself."""
        return content.digest not in self._came


_TAR, _RAW = ".tar", ".raw"
# Ours that are files (docs/format.md, Media types): an adapter's, a model's.
_FILES = frozenset(
    {
        mediatype.AIMAGE_SAFETENSORS,
        mediatype.AIMAGE_FILE,
        mediatype.AIMAGE_GGUF,
        mediatype.AIMAGE_ONNX,
        mediatype.AIMAGE_TORCHSCRIPT,
        mediatype.AIMAGE_SAVEDMODEL,
        mediatype.AIMAGE_TRANSFORMERS,
        mediatype.AIMAGE_LORA,
    }
)
# Whose tars and raw files these are: ModelPack's (and before the CNCF), KitOps', Docker Model
# Runner's; the dialects of those names say where that is specified.
_NEIGHBOURS = (
    "application/vnd.cncf.model.",
    "application/vnd.cnai.model.",
    "application/vnd.kitops.modelkit.",
    "application/vnd.docker.ai.",
)


def is_ours(stored: StoredAImage) -> bool:
    """Return whether the AImage config is one that was packed, and not made of a neighbour's."""
    if stored.dialect.name == "modelpack":
        return CARRIED_CONFIG in stored.manifest.annotations
    return stored.dialect.name not in ("docker", "kitops")


def is_gathered(layer: Layer) -> bool:
    """Return whether it is a tensor, or the experts of a layer: no whole file of such a type."""
    return layer.is_tensor and not layer.name.endswith(".safetensors")


def is_tar(layer: Layer) -> bool:
    """Return whether it is an archive of a neighbour's, which stands for what is in it."""
    plain, _ = mediatype.split_compression(layer.descriptor.media_type)
    return plain.startswith(_NEIGHBOURS) and plain.endswith(_TAR)


def is_packed(layer: Layer) -> bool:
    """Return whether it is a file that was compressed on its way in.

    One of ours, a neighbour's raw file, or one of which the manifest says what it unpacks to.
    """
    plain, compression = mediatype.split_compression(layer.descriptor.media_type)
    if not compression or is_tar(layer):
        return False
    is_raw = plain.startswith(_NEIGHBOURS) and plain.endswith(_RAW)
    return layer.content is not None or plain in _FILES or is_raw

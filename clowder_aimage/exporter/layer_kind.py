"""Kinds of layers by media type: part of a weight file, a file, or an archive of files.

Only what somebody's table names is opened. A layer of any other type, an execution provider's say,
is the file that it was, however its type ends.
"""

from __future__ import annotations

from clowder_aimage.dialect import Layer
from clowder_aimage.dialect.ollama import CARRIED_CONFIG
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.oci import mediatype

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

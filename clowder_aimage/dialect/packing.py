"""Layers that are packed: compressed files, and tars of other packaging tools."""

from __future__ import annotations

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.dialect.vendor import MODEL_INDEX
from clowder_aimage.oci import mediatype

_TAR, _RAW, _DATA = ".tar", ".raw", ".dataset.v1."
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


def has_packed_layers(aimage: AImage) -> bool:
    """Return True if a layer of an AImage must be unpacked before it can be run."""
    return any(map(is_unpacked_to_run, aimage.layers))


def is_unpacked_to_run(layer: Layer) -> bool:
    """Return True for a packed layer other than data to train with, which may be large."""
    is_data = _DATA in layer.descriptor.media_type
    return not is_data and (is_tar(layer) or is_packed(layer))


def is_known_late(aimage: AImage) -> bool:
    """Return True if its blobs must be in the store before it is known which model it is.

    It is packed, or an image model of another tool, which does not state its pipeline.
    """
    is_pipeline = any(layer.name.endswith(MODEL_INDEX) for layer in aimage.layers)
    return has_packed_layers(aimage) or (is_pipeline and "pipeline" not in aimage.properties)

"""Mountable images: container images with the files of a model, for programs that mount images.

A layer is an uncompressed tar with the files of one component below ``models/``, as KServe's
"modelcars" have them (kserve/kserve, python/storage/kserve_storage.py, ``_download_oci``). The
image config (image-spec, config.md) also describes the AImage that the files were exported from:
its manifest and config, and the position in a layer of every blob, so that a pull stores the AImage
itself, and needs no byte of the tars twice.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Digest, Manifest, mediatype, read_json
from clowder_aimage.oci.manifest import encode

ORIGIN = "vnd.clowder.aimage.origin"
# Directory of the files, and the working directory of the image.
ROOT = "models"
# Platforms of the index: the same layers for each.
ARCHITECTURES = ("amd64", "arm64")


@dataclass(frozen=True, slots=True)
class Extent:
    """``size`` bytes at ``offset`` of a layer."""

    layer: Descriptor
    offset: int
    size: int


# Consecutive parts of a blob: ranges of layers, and bytes that no file has.
Parts = Sequence[Extent | bytes]


@dataclass(frozen=True, slots=True)
class Origin:
    """The AImage in a mountable image: its manifest, and the parts of its blobs."""

    manifest: Manifest
    blobs: Mapping[Digest, Parts]


def write_index(
    layers: Sequence[Descriptor], origin: Origin, licenses: str
) -> tuple[Descriptor, dict[Digest, bytes]]:
    """Return the index of an image with these layers, and the bytes of its manifests and configs.

    ``licenses`` are those of the AImage, for policies; empty if it states none.

    Raises FormatError: the AImage has too many blobs for an image config.
    """
    stated = {"annotations": {mediatype.LICENSES: licenses}} if licenses else {}
    documents: dict[Digest, bytes] = {}
    manifests = []
    described = _describe(layers, origin)
    for architecture in ARCHITECTURES:
        config = encode(
            {
                "architecture": architecture,
                "os": "linux",
                "config": {"WorkingDir": f"/{ROOT}"},
                "rootfs": {"type": "layers", "diff_ids": [str(x.digest) for x in layers]},
                ORIGIN: described,
            }
        )
        if len(config) > MAX_DOCUMENT_SIZE:
            raise FormatError(
                f"an image config of {len(config)} bytes is too large: the limit is "
                f"{MAX_DOCUMENT_SIZE}",
                hint="pack the model into fewer layers, with its experts together",
            )
        manifest = Manifest.build(
            {
                "schemaVersion": 2,
                "mediaType": mediatype.OCI_MANIFEST,
                "config": Descriptor.of(mediatype.OCI_CONFIG, config).to_json(),
                "layers": [layer.to_json() for layer in layers],
            }
            | stated
        )
        documents |= {manifest.config.digest: config, manifest.digest: manifest.raw}
        entry = {
            "platform": {"architecture": architecture, "os": "linux"},
            "annotations": {mediatype.MOUNTABLE: "true"},
        }
        manifests.append(manifest.descriptor.to_json() | entry)
    raw = encode({"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": manifests})
    index = Descriptor.of(mediatype.OCI_INDEX, raw)
    documents[index.digest] = raw
    return index, documents


def _describe(layers: Sequence[Descriptor], origin: Origin) -> dict[str, Any]:
    numbers = {layer.digest: number for number, layer in enumerate(layers)}

    def describe(part: Extent | bytes) -> object:
        if isinstance(part, Extent):
            return [numbers[part.layer.digest], part.offset, part.size]
        return base64.b64encode(part).decode()

    return {
        "mediaType": origin.manifest.media_type,
        "manifest": base64.b64encode(origin.manifest.raw).decode(),
        "blobs": {str(digest): [*map(describe, parts)] for digest, parts in origin.blobs.items()},
    }


def may_be_mountable(manifest: Manifest) -> bool:
    """Return True for an image whose config may describe an AImage."""
    is_image = manifest.config.media_type in (mediatype.OCI_CONFIG, mediatype.DOCKER_CONFIG)
    return is_image and all(
        ".tar" in layer.media_type and mediatype.MEDIATYPE not in layer.annotations
        for layer in manifest.layers
    )


def read_origin(manifest: Manifest, config: bytes) -> Origin | None:
    """Return the AImage in an image; None if its config describes none.

    Raises FormatError: the description is malformed, or a tool has compressed the layers.
    """
    value = read_json(config, "the image config")
    described = value.get(ORIGIN) if isinstance(value, dict) else None
    if described is None:
        return None
    match value, described:
        case (
            {"rootfs": {"diff_ids": list(diff_ids)}},
            {"mediaType": str(media_type), "manifest": str(text), "blobs": dict(table)},
        ):
            pass
        case _:
            raise FormatError(f"{ORIGIN} of the image config is malformed")
    if [str(layer.digest) for layer in manifest.layers] != diff_ids:
        raise FormatError(
            f"the layers of the image {manifest.digest} were compressed by another tool",
            hint="copy the image without compression, or mount it and create an AImage from it",
        )
    document = Manifest.parse(_decode(text), media_type)
    sizes = {child.digest: child.size for child in document.children}
    blobs: dict[Digest, Parts] = {}
    for key, parts in table.items():
        digest = Digest.parse(key)
        blobs[digest] = _parse_parts(parts, manifest.layers)
        if sum(map(_measure, blobs[digest])) != sizes.get(digest):
            raise FormatError(f"{ORIGIN}: the parts of {digest} do not have its size")
    if missing := sizes.keys() - blobs.keys():
        raise FormatError(f"{ORIGIN} has no parts of {min(missing)}")
    return Origin(document, blobs)


def _parse_parts(value: object, layers: Sequence[Descriptor]) -> Parts:
    parts: list[Extent | bytes] = []
    for part in value if isinstance(value, list) else [None]:
        match part:
            case str(text):
                parts.append(_decode(text))
            case [int(number), int(offset), int(size)] if (
                0 <= number < len(layers)
                and min(offset, size) >= 0
                and offset + size <= layers[number].size
            ):
                parts.append(Extent(layers[number], offset, size))
            case _:
                raise FormatError(f"{ORIGIN} of the image config is malformed: {part!r:.80}")
    return parts


def _measure(part: Extent | bytes) -> int:
    return part.size if isinstance(part, Extent) else len(part)


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise FormatError(f"{ORIGIN} of the image config has invalid base64") from None

"""Clowder's own dialect: an OCI artifact that says what each layer is."""

from __future__ import annotations

import json
from typing import Any

from clowder_aimage.dialect.aimage import (
    AImage,
    Layer,
    check_names,
    parse_content,
    parse_dtype,
    parse_shape,
)
from clowder_aimage.dialect.layer_name import name_all
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Manifest, mediatype


class ClowderDialect:
    """The default. With ``custom`` the manifest's own media type is Clowder's too, as Clowder's
    storage document prefers; registries refuse that, image layouts do not.

    Layers without a name are read, too (that document's samples have none, and its EP layers no
    media type that we know); what is not ours keeps its media type."""

    def __init__(self, *, custom: bool = False) -> None:
        self._media_type = mediatype.AIMAGE_MANIFEST if custom else mediatype.OCI_MANIFEST

    @property
    def name(self) -> str:
        return "custom" if self._media_type == mediatype.AIMAGE_MANIFEST else "clowder"

    def matches(self, manifest: Manifest) -> bool:
        return (
            manifest.media_type == self._media_type
            and manifest.config.media_type == mediatype.AIMAGE_CONFIG
        )

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        said = [layer.annotations.get(mediatype.NAME) for layer in manifest.layers]
        names = zip(manifest.layers, name_all(manifest.layers, said), strict=True)
        layers = check_names(tuple(_read(layer, name) for layer, name in names))
        return AImage(config, layers, manifest.subject)

    def write(self, aimage: AImage) -> tuple[Manifest, bytes]:
        config = Descriptor.of(mediatype.AIMAGE_CONFIG, aimage.config, algorithm=aimage.algorithm)
        document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": self._media_type,
            "artifactType": mediatype.AIMAGE_MANIFEST,
            "config": config.to_json(),
            "layers": [_write(layer) for layer in aimage.layers],
        }
        if aimage.subject is not None:
            document["subject"] = aimage.subject.to_json()
        annotations = manifest_annotations(aimage)
        if annotations:
            document["annotations"] = annotations
        return Manifest.build(document), aimage.config


def manifest_annotations(aimage: AImage) -> dict[str, str]:
    """OCI's own annotation keys, from the config: other tools show them."""
    properties = aimage.properties
    keys = (("created", mediatype.CREATED), ("license", mediatype.LICENSES))
    return {
        annotation: value
        for key, annotation in keys
        if isinstance(value := properties.get(key), str) and value
    }


def layer_annotations(layer: Layer) -> dict[str, str]:
    """Name, dtype and shape of a layer as annotations."""
    annotations = {mediatype.NAME: layer.name}
    if layer.dtype is not None:
        annotations[mediatype.DTYPE] = layer.dtype
    if layer.shape is not None:
        annotations[mediatype.SHAPE] = json.dumps(list(layer.shape), separators=(",", ":"))
    if layer.content is not None:
        annotations[mediatype.CONTENT_DIGEST] = str(layer.content.digest)
        annotations[mediatype.CONTENT_SIZE] = str(layer.content.size)
    return annotations


def annotated_layer(layer: Descriptor, plain: Descriptor, name: str | None = None) -> Layer:
    """The AImage layer with content ``plain`` that the annotations of ``layer`` describe; ``name``
    is what to call it where they do not say. Raises FormatError."""
    name = layer.annotations.get(mediatype.NAME, name)
    if name is None:
        raise FormatError(f"layer {layer.digest} has no annotation {mediatype.NAME}")
    said = layer.annotations.get
    return Layer(
        plain,
        name,
        parse_dtype(said(mediatype.DTYPE)),
        parse_shape(said(mediatype.SHAPE)),
        parse_content(
            plain.media_type, said(mediatype.CONTENT_DIGEST), said(mediatype.CONTENT_SIZE)
        ),
    )


def _read(layer: Descriptor, name: str) -> Layer:
    return annotated_layer(layer, Descriptor(layer.media_type, layer.digest, layer.size), name)


def _write(layer: Layer) -> dict[str, Any]:
    return layer.descriptor.to_json() | {"annotations": layer_annotations(layer)}

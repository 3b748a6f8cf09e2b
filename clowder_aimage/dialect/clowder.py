"""Clowder's own dialect: an OCI artifact with a description of each layer."""

from __future__ import annotations

import json

from clowder_aimage.dialect.aimage import AImage, Layer, parse_content, parse_dtype, parse_shape
from clowder_aimage.dialect.dialect import Dialect, build_manifest
from clowder_aimage.dialect.layer_name import name_layers
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Manifest, mediatype


class ClowderDialect(Dialect):
    """The default dialect, and ``custom``, whose manifest has Clowder's media type, too.

    Clowder's storage document prefers ``custom``; registries refuse it, image layouts do not.
    Layers without a name are also read (the samples in that document have none, and its EP layers
    no known media type); foreign layers keep their media type.
    """

    def __init__(self, *, custom: bool = False) -> None:
        self.name = "custom" if custom else "clowder"
        self._media_type = mediatype.AIMAGE_MANIFEST if custom else mediatype.OCI_MANIFEST

    def matches(self, manifest: Manifest) -> bool:
        return (
            manifest.media_type == self._media_type
            and manifest.config.media_type == mediatype.AIMAGE_CONFIG
        )

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        names = [layer.annotations.get(mediatype.NAME) for layer in manifest.layers]
        return AImage(config, name_layers(manifest.layers, names, _read), manifest.subject)

    def read_config(self, manifest: Manifest, config: bytes) -> bytes:  # noqa: ARG002
        """Return the config, without reading the layers."""
        return config

    def write(self, aimage: AImage, /) -> tuple[Manifest, bytes]:
        has_titles = aimage.properties.get("format") == "files"
        return build_manifest(
            aimage,
            mediatype.AIMAGE_CONFIG,
            aimage.config,
            [
                layer.descriptor.to_json()
                | {"annotations": build_layer_annotations(layer) | _build_title(layer, has_titles)}
                for layer in aimage.layers
            ],
            media_type=self._media_type,
            artifact_type=mediatype.AIMAGE_MANIFEST,
            annotations=build_manifest_annotations(aimage),
        )


def build_manifest_annotations(aimage: AImage) -> dict[str, str]:
    """Return the annotations in the config, and OCI's for its properties."""
    properties = aimage.properties
    keys = [("created", mediatype.CREATED), ("license", mediatype.LICENSES)]
    keys += [("variant", mediatype.VARIANT)]
    return collect_config_annotations(aimage) | {
        annotation: value
        for key, annotation in keys
        if isinstance(value := properties.get(key), str) and value
    }


def collect_config_annotations(aimage: AImage) -> dict[str, str]:
    """Return the annotations in the config that may be written to a manifest."""
    annotations = aimage.properties.get("annotations")
    return {
        key: value
        for key, value in sorted(annotations.items() if isinstance(annotations, dict) else ())
        if isinstance(value, str) and not mediatype.is_own_key(key)
    }


def _build_title(layer: Layer, has_titles: bool) -> dict[str, str]:
    """Return the title, by which other clients write a layer to a file (docs/adr/0018)."""
    return {mediatype.TITLE: layer.name} if has_titles and layer.content is None else {}


def build_layer_annotations(layer: Layer) -> dict[str, str]:
    """Return name, dtype and shape of a layer as annotations."""
    annotations = {mediatype.NAME: layer.name}
    if layer.dtype is not None:
        annotations[mediatype.DTYPE] = layer.dtype
    if layer.shape is not None:
        annotations[mediatype.SHAPE] = json.dumps(list(layer.shape), separators=(",", ":"))
    if layer.content is not None:
        annotations[mediatype.CONTENT_DIGEST] = str(layer.content.digest)
        annotations[mediatype.CONTENT_SIZE] = str(layer.content.size)
    return annotations


def parse_layer(layer: Descriptor, plain: Descriptor, name: str | None = None) -> Layer:
    """Return the AImage layer described by the annotations of ``layer``, with content ``plain``.

    ``name`` is used if they have none. Raises FormatError.
    """
    name = layer.annotations.get(mediatype.NAME, name)
    if name is None:
        raise FormatError(f"layer {layer.digest} has no annotation {mediatype.NAME}")
    value = layer.annotations.get
    return Layer(
        plain,
        name,
        parse_dtype(value(mediatype.DTYPE)),
        parse_shape(value(mediatype.SHAPE)),
        parse_content(
            plain.media_type, value(mediatype.CONTENT_DIGEST), value(mediatype.CONTENT_SIZE)
        ),
    )


def _read(layer: Descriptor, name: str) -> Layer:
    return parse_layer(layer, Descriptor(layer.media_type, layer.digest, layer.size), name)

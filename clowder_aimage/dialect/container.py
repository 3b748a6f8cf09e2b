"""AImages as container images, for registries that accept only these.

The config is an OCI image config (image-spec, config.md) whose ``diff_ids`` are the digests of the
original blobs. Tools that copy images may compress such layers and drop their annotations (skopeo
does both) but keep the config, so it contains the table of the layers, and compressed blobs are
identified by their diff_id.
"""

from __future__ import annotations

import contextlib
from typing import Any

from clowder_aimage.dialect.aimage import AImage, Layer, check_names, from_named, to_named
from clowder_aimage.dialect.clowder import (
    build_layer_annotations,
    collect_config_annotations,
    parse_layer,
)
from clowder_aimage.dialect.dialect import Dialect, build_manifest
from clowder_aimage.dialect.ollama import CARRIED_CONFIG, build_foreign_config, find_carried_config
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Digest, Manifest, mediatype, read_json
from clowder_aimage.oci.manifest import encode

CARRIED_LAYERS = "vnd.clowder.aimage.layers"


class ContainerDialect(Dialect):
    """OCI image config and layer types; a layer's actual media type is an annotation."""

    name = "container"

    def matches(self, manifest: Manifest) -> bool:
        return manifest.config.media_type in (mediatype.OCI_CONFIG, mediatype.DOCKER_CONFIG)

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        try:
            value = read_json(config, "the image config")
            texts = value["rootfs"]["diff_ids"]
        except (FormatError, KeyError, TypeError):
            raise FormatError("the image config has no rootfs.diff_ids") from None
        if not isinstance(texts, list) or len(texts) != len(manifest.layers):
            raise FormatError("the image config must have one diff_id for each layer")
        diff_ids = [Digest.parse(text) for text in texts]
        if (table := value.get(CARRIED_LAYERS)) is None:
            layers = tuple(map(_read_annotated, manifest.layers))
        else:
            layers = _read_table(table)
        if [layer.descriptor.digest for layer in layers] != diff_ids:
            raise FormatError("the layers do not match the diff_ids of the image config")
        aimage_config = find_carried_config(config) or build_foreign_config(layers)
        return AImage(aimage_config, check_names(layers), manifest.subject)

    def write(self, aimage: AImage, /) -> tuple[Manifest, bytes]:
        config = encode(
            {
                "architecture": "unknown",
                "os": "unknown",
                "config": {},
                "rootfs": {
                    "type": "layers",
                    "diff_ids": [str(layer.descriptor.digest) for layer in aimage.layers],
                },
                CARRIED_CONFIG: aimage.config_text,
                CARRIED_LAYERS: [
                    to_named(layer, layer.descriptor.media_type) for layer in aimage.layers
                ],
            }
        )
        layers = [_write(layer) for layer in aimage.layers]
        annotations: dict[str, str] = {}
        # A config that is not valid is carried unread.
        with contextlib.suppress(FormatError):
            annotations = collect_config_annotations(aimage)
        return build_manifest(aimage, mediatype.OCI_CONFIG, config, layers, annotations=annotations)


def _read_table(table: object) -> tuple[Layer, ...]:
    if not isinstance(table, list):
        raise FormatError(f"{CARRIED_LAYERS} must be a list")
    rows = (Descriptor.from_json(row, CARRIED_LAYERS) for row in table)
    return tuple(from_named(row, row.media_type) for row in rows)


def _read_annotated(layer: Descriptor) -> Layer:
    media_type = layer.annotations.get(mediatype.MEDIATYPE)
    if media_type is None:
        raise FormatError(
            "this is a container image, not an AImage",
            hint="it can be pulled, pushed and listed, but not run",
        )
    return parse_layer(layer, Descriptor(media_type, layer.digest, layer.size))


def _write(layer: Layer) -> dict[str, Any]:
    plain = layer.descriptor
    annotations = build_layer_annotations(layer) | {mediatype.MEDIATYPE: plain.media_type}
    value = Descriptor(mediatype.OCI_LAYER_TAR, plain.digest, plain.size).to_json()
    return value | {"annotations": annotations}

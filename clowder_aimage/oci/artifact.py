"""Artifacts of any type (OCI image-spec, "Guidelines for Artifact Usage")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clowder_aimage.oci import mediatype
from clowder_aimage.oci.descriptor import Descriptor
from clowder_aimage.oci.manifest import Manifest

EMPTY = b"{}"
EMPTY_CONFIG = Descriptor.of(mediatype.OCI_EMPTY, EMPTY)


def build_artifact(
    artifact_type: str,
    layers: Sequence[Descriptor],
    subject: Descriptor,
    annotations: Mapping[str, str],
    config: Descriptor = EMPTY_CONFIG,
) -> Manifest:
    """Build the manifest of an artifact: a config, the files as layers, and its subject."""
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "artifactType": artifact_type,
        "config": config.to_json(),
        "layers": [layer.to_json() for layer in layers],
        "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
    }
    if annotations:
        document["annotations"] = dict(annotations)
    return Manifest.build(document)

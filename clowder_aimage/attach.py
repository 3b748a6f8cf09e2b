"""attach: files for a manifest in a registry (OCI image-spec, "Guidelines for Artifact Usage").

A signature or a bill of materials becomes a separate artifact, whose ``subject`` is the manifest
that it describes. That manifest does not change.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from clowder_aimage.content import OnEvent, Overlay, Source, copy
from clowder_aimage.content.copy_option import ignore
from clowder_aimage.content.store import Reader, file_body
from clowder_aimage.errors import ModelError, NotFoundError, UsageError
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository

EMPTY = b"{}"
_LAYER = "application/octet-stream"
_NAME = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}"  # RFC 6838, 4.2
_MEDIA_TYPE = re.compile(rf"{_NAME}/{_NAME}")


def attach(
    reference: Reference,
    files: Sequence[Path],
    connection: ClientOptions,
    *,
    artifact_type: str,
    annotations: Mapping[str, str] | None = None,
    on_event: OnEvent = ignore,
) -> tuple[Descriptor, Descriptor]:
    """Push ``files`` as one artifact whose subject is the manifest of ``reference``.

    The same files with the same type and annotations give the same artifact.

    Returns:
        the descriptors of the new manifest and of its subject.

    Raises:
        UsageError: an invalid media type, two files of one name, or no registry host.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be sent.
    """
    if _MEDIA_TYPE.fullmatch(artifact_type) is None:
        raise UsageError(f"invalid media type {artifact_type!r}", remedy="attach_type")
    for title, count in Counter(file.name for file in files).items():
        if count > 1:
            raise UsageError(f"two files have the name {title}")
    with Repository(reference, connection) as repository:
        subject = repository.resolve(reference)
        layers = [_layer(file) for file in files]
        manifest = build(artifact_type, layers, subject, annotations or {})
        documents = {manifest.digest: manifest.raw, manifest.config.digest: EMPTY}
        source = Overlay(_Files(layers, files), manifest.descriptor, documents)
        name, jobs = reference.with_digest(manifest.digest), connection.jobs(reference.registry)
        copy(source, name, repository, concurrency=jobs, on_event=on_event)
    return manifest.descriptor, subject


def build(
    artifact_type: str,
    layers: Sequence[Descriptor],
    subject: Descriptor,
    annotations: Mapping[str, str],
) -> Manifest:
    """Build the manifest of an artifact: an empty config, the files as layers, and its subject."""
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "artifactType": artifact_type,
        "config": Descriptor.of(mediatype.OCI_EMPTY, EMPTY).to_json(),
        "layers": [layer.to_json() for layer in layers],
        "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
    }
    if annotations:
        document["annotations"] = dict(annotations)
    return Manifest.build(document)


def _layer(file: Path) -> Descriptor:
    """Return the descriptor of a file, titled with its name without the directories."""
    try:
        with file.open("rb") as opened:
            encoded = hashlib.file_digest(opened, "sha256").hexdigest()
            size = opened.tell()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    return Descriptor(_LAYER, Digest("sha256", encoded), size, {mediatype.TITLE: file.name})


class _Files(Source):
    """Local files, as a source to copy from."""

    def __init__(self, layers: Sequence[Descriptor], files: Sequence[Path]) -> None:
        self._paths = {layer.digest: file for layer, file in zip(layers, files, strict=True)}

    def resolve(self, reference: Reference, /) -> Descriptor:
        raise NotFoundError(f"{reference} not found among the files")

    def exists(self, content: Descriptor, /) -> bool:
        return content.digest in self._paths

    def open(self, content: Descriptor, offset: int = 0, _: int | None = None, /) -> Reader:
        return file_body(self._paths[content.digest])(offset)

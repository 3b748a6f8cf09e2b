"""Pictures as artifacts: layers of picture files, their settings as config, the model as subject.

docs/format.md, "Pictures". The same pictures give the same artifact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clowder_aimage.content import ContentStore, OnEvent, Overlay, Source, copy, read_all
from clowder_aimage.content.copy_option import ignore
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype, read_json
from clowder_aimage.oci.artifact import build_artifact
from clowder_aimage.oci.manifest import encode, parse_document
from clowder_aimage.pictures.generated_picture import GeneratedPicture
from clowder_aimage.registry import ClientOptions, Repository

MAX_CONFIG = 1 << 20  # bytes


def check_target(target: Reference, connection: ClientOptions) -> None:
    """Reject a name that pictures cannot be pushed to. Raises UsageError."""
    if target.digest is not None:
        raise UsageError(
            f"{target} names a digest: pictures are pushed by tag", hint="omit the digest"
        )
    if connection.expand(target).registry is None:
        raise UsageError(
            f"{target} has no registry host: pictures cannot be pushed to it",
            hint="use a name with one, such as registry.example.com/team/pictures:v1",
        )


def check_replaceable(target: Reference, connection: ClientOptions) -> None:
    """Reject a tag that has other content than pictures, such as a model: it would be lost.

    Raises:
        UsageError: It has other content.
        UnauthorizedError, NetworkError, RegistryError: The registry does not answer, or
            accepts no upload.
    """
    with Repository(target, connection) as repository:
        _check_replaceable(target, repository)
        repository.check_push()


def _check_replaceable(target: Reference, repository: Repository) -> None:
    try:
        content = repository.resolve(target)
    except NotFoundError:
        return
    document = parse_document(read_all(repository.open(content), content), content.media_type)
    if document.artifact_type != mediatype.AIMAGE_PICTURE:
        raise UsageError(
            f"{target} is not an artifact of pictures, and is not replaced by one",
            hint="push the pictures under another tag",
        )


def push_pictures(
    pictures: Sequence[GeneratedPicture],
    target: Reference,
    store: ContentStore,
    connection: ClientOptions,
    *,
    on_event: OnEvent = ignore,
) -> Descriptor:
    """Push pictures of one model as one artifact; return the descriptor of its manifest.

    Raises:
        UsageError: ``target`` lacks a registry host, has a digest, or is the name of other content;
            or the metadata of the pictures do not name their model.
        NotFoundError: The manifest of their model is in neither the store nor a registry.
        UnauthorizedError, NetworkError, RegistryError: It cannot be sent.
    """
    check_target(target, connection)
    subject = find_model(pictures[0].facts, store, connection)
    layers = [picture.layer for picture in pictures]
    config = encode_picture_config(pictures)
    config_descriptor = Descriptor.of(mediatype.AIMAGE_PICTURE_CONFIG, config)
    manifest = build_artifact(mediatype.AIMAGE_PICTURE, layers, subject, {}, config_descriptor)
    blobs = {layer.digest: made.data for layer, made in zip(layers, pictures, strict=True)}
    source = Overlay.of(manifest, config, blobs, store)
    with Repository(target, connection) as repository:
        _check_replaceable(target, repository)
        connections = connection.compute_connections(target.registry)
        copy(source, target, repository, concurrency=connections, on_event=on_event)
    return manifest.descriptor


def encode_picture_config(pictures: Sequence[GeneratedPicture]) -> bytes:
    """Return the config of an artifact of pictures, which differ in their seeds only."""
    settings = {name: value for name, value in pictures[0].facts.items() if name != "seed"}
    entries = [
        {
            "title": picture.layer.annotations[mediatype.TITLE],
            "digest": str(picture.layer.digest),
            "seed": picture.seed,
        }
        for picture in pictures
    ]
    return encode({"schemaVersion": 1, "settings": settings, "pictures": entries})


def find_model(
    facts: Mapping[str, Any], store: ContentStore, connection: ClientOptions
) -> Descriptor:
    """Return the descriptor of the manifest of the model in the facts. Raises as push_pictures."""
    try:
        digest = Digest.parse(str(facts["digest"]))
        reference = Reference.parse(str(facts["reference"])).with_digest(digest)
    except (KeyError, UsageError, FormatError):
        raise UsageError("the pictures have no metadata about their model") from None
    try:
        return store.resolve(reference)
    except NotFoundError:
        if connection.expand(reference).registry is None:
            raise
    with Repository(reference, connection) as repository:
        return repository.describe(reference)


def read_settings(source: Source, manifest: Manifest, layer: Descriptor) -> dict[str, Any]:
    """Return the settings of a picture from the config of its artifact; empty without.

    Raises FormatError, VerificationError.
    """
    if not _has_settings(manifest):
        return {}
    raw = read_all(source.open(manifest.config), manifest.config, MAX_CONFIG)
    return _parse(raw, str(layer.digest))


def _parse(raw: bytes, digest: str) -> dict[str, Any]:
    value = read_json(raw, "the config of the pictures", MAX_CONFIG)
    if not isinstance(value, dict) or value.get("schemaVersion") != 1:
        raise FormatError("the config of the pictures has another version")
    settings, seeds = value.get("settings"), dict(_iter_seeds(value.get("pictures")))
    if not isinstance(settings, dict) or digest not in seeds:
        raise FormatError(f"the config of the pictures has no settings for {digest}")
    return settings | {"seed": seeds[digest]}


def _has_settings(manifest: Manifest) -> bool:
    """Return True if an artifact has a config with the settings of its pictures."""
    config = manifest.config
    return config.media_type == mediatype.AIMAGE_PICTURE_CONFIG and config.size <= MAX_CONFIG


def _iter_seeds(pictures: object) -> Iterator[tuple[str, object]]:
    for entry in pictures if isinstance(pictures, list) else ():
        if isinstance(entry, dict):
            yield str(entry.get("digest")), entry.get("seed")

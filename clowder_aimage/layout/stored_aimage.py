"""AImages in a store: resolve names, read manifests, inflate blobs."""

from __future__ import annotations

from dataclasses import dataclass

from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.decompress import open_decompressed, parse_compression
from clowder_aimage.content.gate import find_gate
from clowder_aimage.content.store import BlobFiles, Body, ContentStore, Lease, Reader, Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import AImage, Dialect, detect
from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE, ParseCache
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Index, Manifest, Reference, mediatype

MAX_CONFIG_SIZE = MAX_DOCUMENT_SIZE
_PARSED = ParseCache()


@dataclass(frozen=True, slots=True)
class StoredAImage:
    """An AImage in a store, with its stored manifest."""

    descriptor: Descriptor
    manifest: Manifest
    dialect: Dialect
    aimage: AImage

    @property
    def size(self) -> int:
        """The bytes of its blobs."""
        return sum(blob.size for blob in self.manifest.children)


def read_manifest(store: Source, descriptor: Descriptor) -> Manifest:
    """Read a manifest, verified. Raises NotFoundError, ContentError."""
    if descriptor.media_type not in mediatype.DOCUMENTS:
        # As the type of a file it may be sent by a server, but the policy is asked about manifests.
        raise FormatError(
            f"{descriptor.digest} is not named as a manifest, but as {descriptor.media_type[:100]}"
        )
    return Manifest.parse(read_all(store.open(descriptor), descriptor), descriptor.media_type)


def lease_manifest(store: ContentStore, reference: Reference, lease: Lease) -> Descriptor:
    """Resolve a name and lease its manifest; repeat if the name has moved in between.

    A manifest may be collected between the move of its name and the lease.
    Raises NotFoundError.
    """
    leased = None
    while (descriptor := store.resolve(reference)) != leased:
        leased = descriptor
        lease.add(leased.digest)
    admit(store, descriptor, reference)
    return descriptor


def admit(store: Source, content: Descriptor, reference: Reference) -> None:
    """Ask the policy about a stored manifest by the name that it is asked by, too.

    Raises PolicyError: the policy does not accept it; NotFoundError, VerificationError.
    """
    if (gate := find_gate()) is not None:
        gate.admit_asked(store, content, reference)


def read_aimage(store: ContentStore, reference: Reference) -> StoredAImage:
    """Read the AImage that ``reference`` names in ``store``.

    Raises NotFoundError: there is none, or its config is missing; ContentError: it is not an
    AImage, or not intact.
    """
    root = store.resolve(reference)
    admit(store, root, reference)
    return read_stored(store, root)


def read_stored(store: Source, descriptor: Descriptor) -> StoredAImage:
    """Read the AImage with the manifest ``descriptor``. Raises as ``read_aimage`` does."""
    return interpret(store, descriptor, read_manifest(store, descriptor))


def interpret(
    store: Source | BlobFiles, descriptor: Descriptor, manifest: Manifest
) -> StoredAImage:
    """Return the AImage that a manifest describes. Raises as ``read_aimage`` does."""
    dialect = detect(manifest)
    config = read_all(store.open(manifest.config), manifest.config, MAX_CONFIG_SIZE)
    key, size = (manifest.digest, manifest.media_type), len(manifest.raw) + len(config)
    aimage = _PARSED.get(key, size, lambda: dialect.read(manifest, config))
    return StoredAImage(descriptor, manifest, dialect, aimage)


def list_packed_layers(
    store: ContentStore, stored: StoredAImage
) -> list[tuple[Descriptor, Descriptor]]:
    """Return the stored compressed blobs with their plain blobs that are missing.

    Raises FormatError: an unsupported compression.
    """
    # Keyed by the plain blob: two layers may share one.
    packed: dict[Descriptor, Descriptor] = {}
    for layer, aimage_layer in zip(stored.manifest.layers, stored.aimage.layers, strict=True):
        plain = aimage_layer.descriptor
        if layer.digest == plain.digest or store.exists(plain) or not store.exists(layer):
            continue
        if not parse_compression(layer.media_type):
            raise FormatError(
                f"layer {layer.digest} ({layer.media_type[:100]}) has an unsupported compression",
                hint="copy the AImage again without compression, or with gzip or zstd",
            )
        packed[plain] = layer
    return [(blob, plain) for plain, blob in packed.items()]


def inflate(store: ContentStore, stored: StoredAImage) -> None:
    """Restore blobs that another tool has compressed, verified against their diff_ids.

    Raises FormatError: an unsupported compression, or malformed data; UsageError: zstd without its
    package; VerificationError: the blob is damaged, or its content not the plain blob.
    """
    for layer, plain in list_packed_layers(store, stored):
        store.push(plain, _build_plain_body(store, layer, plain))


def inflate_copied(store: ContentStore, root: Descriptor, document: Manifest | Index) -> None:
    """Inflate the copied content if it is an AImage; other artifacts stay unchanged."""
    if isinstance(document, Manifest):
        try:
            stored = interpret(store, root, document)
        except FormatError:
            return
        inflate(store, stored)


def _build_plain_body(store: ContentStore, layer: Descriptor, plain: Descriptor) -> Body:
    def open_at(offset: int = 0, /) -> Reader:
        reader = open_decompressed(store, layer, plain)
        while offset and (skipped := len(reader.read(min(offset, CHUNK_SIZE)))):
            offset -= skipped
        return reader

    return open_at

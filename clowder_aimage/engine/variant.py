"""Smaller variants of an AImage in its registry, which are used while the AImage is fetched.

A variant is a manifest of the same index, or an AImage whose subject is the AImage. Both have the
annotation ``vnd.clowder.aimage.variant`` with the precision (docs/format.md, "Variants").
"""

from __future__ import annotations

from clowder_aimage.content.graph import read_document
from clowder_aimage.content.platform import (
    ManifestSelector,
    Platform,
    candidates_in,
    choose,
    select,
)
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import FormatError, VerificationError
from clowder_aimage.layout.stored_aimage import interpret, read_manifest
from clowder_aimage.oci import Descriptor, Index, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository

_SAME = ("family", "pipeline", "architecture", "format")  # properties of all variants


def find_variant(
    reference: Reference, connection: ClientOptions, precision: str
) -> Reference | None:
    """Return the variant of an AImage by its digest; None if its registry has none.

    Raises:
        VerificationError: it is not a variant of the same AImage.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be read from the
            registry.
        UsageError: several manifests of an index match.
        FormatError: a document or an AImage cannot be read.
    """
    with Repository(reference, connection) as repository:
        root = repository.resolve(reference)
        base, manifest = select(
            repository, root, reference, ManifestSelector(fallback_variant=precision)
        )
        found = _in_index(repository, root, reference, precision)
        if found is None:
            found = _referrer(repository, base, precision)
        if found is None or found.digest == base.digest or isinstance(manifest, Index):
            return None
        whole = interpret(repository, base, manifest).aimage
        try:
            other = interpret(repository, found, read_manifest(repository, found))
            _check_same(whole, base, other.aimage)
        except FormatError as error:
            raise VerificationError(
                f"the variant {precision} of {reference} is {found.digest}, which is not of the "
                f"same AImage: {error.message}"
            ) from None
        return reference.with_digest(found.digest)


def _in_index(
    repository: Repository, root: Descriptor, reference: Reference, precision: str
) -> Descriptor | None:
    if root.media_type not in mediatype.INDEXES:
        return None
    index = read_document(repository, root)
    assert isinstance(index, Index)  # noqa: S101 (for mypy)
    found = [one for one in candidates_in(repository, index) if one.variant == precision]
    here = Platform.here()
    return choose(found, ManifestSelector(), here, reference).descriptor if found else None


def _referrer(repository: Repository, base: Descriptor, precision: str) -> Descriptor | None:
    for one in repository.referrers(base.digest, mediatype.AIMAGE_MANIFEST):
        if one.annotations.get(mediatype.VARIANT) == precision:
            return one
    return None


def _check_same(base: AImage, descriptor: Descriptor, other: AImage) -> None:
    """Check that two AImages differ in the precision of their tensors only. Raises FormatError."""
    if other.subject is not None and other.subject.digest != descriptor.digest:
        raise FormatError(f"its subject is {other.subject.digest}")
    for key in _SAME:
        if base.properties.get(key) != other.properties.get(key):
            raise FormatError(f"it has another {key}")
    layers = {layer.name: layer for layer in other.layers}
    if odd := {layer.name for layer in base.layers} ^ layers.keys():
        raise FormatError(f"only one of them has {min(odd)[:200]}")
    for layer in base.layers:
        same = layers[layer.name]
        is_cast = layer.is_tensor and (layer.dtype is None or layer.dtype != same.dtype)
        if same.shape != layer.shape or not (is_cast or same.descriptor == layer.descriptor):
            raise FormatError(f"{layer.name[:200]} differs")

"""Smaller variants of an AImage in its registry, for use while the AImage is fetched.

A variant is a manifest of the same index, or an AImage whose subject is the AImage. Both have the
annotation ``vnd.clowder.aimage.variant`` with the precision (docs/format.md, "Variants").
"""

from __future__ import annotations

from clowder_aimage.content.graph import read_document
from clowder_aimage.content.platform import (
    ManifestSelector,
    Platform,
    choose,
    list_candidates,
    select,
)
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import FormatError, VerificationError
from clowder_aimage.layout.stored_aimage import interpret, read_manifest
from clowder_aimage.oci import Descriptor, Index, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository

# Properties of all variants
_SAME = ("family", "pipeline", "architecture", "format")


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
        descriptor = _find_in_index(repository, root, reference, precision)
        if descriptor is None:
            descriptor = _find_referrer(repository, base, precision)
        if descriptor is None or descriptor.digest == base.digest or isinstance(manifest, Index):
            return None
        base_aimage = interpret(repository, base, manifest).aimage
        try:
            variant = interpret(repository, descriptor, read_manifest(repository, descriptor))
            _check_variant(base_aimage, base, variant.aimage)
        except FormatError as error:
            raise VerificationError(
                f"the variant {precision} of {reference} is {descriptor.digest}, "
                f"which is not of the same AImage: {error.message}"
            ) from None
        return reference.with_digest(descriptor.digest)


def _find_in_index(
    repository: Repository, root: Descriptor, reference: Reference, precision: str
) -> Descriptor | None:
    if root.media_type not in mediatype.INDEXES:
        return None
    index = read_document(repository, root)
    assert isinstance(index, Index)  # noqa: S101 (for mypy)
    candidates = [
        candidate
        for candidate in list_candidates(repository, index)
        if candidate.variant == precision
    ]
    platform = Platform.detect()
    return (
        choose(candidates, ManifestSelector(), platform, reference).descriptor
        if candidates
        else None
    )


def _find_referrer(repository: Repository, base: Descriptor, precision: str) -> Descriptor | None:
    for referrer in repository.list_referrers(base.digest, mediatype.AIMAGE_MANIFEST):
        if referrer.annotations.get(mediatype.VARIANT) == precision:
            return referrer
    return None


def _check_variant(base: AImage, descriptor: Descriptor, variant: AImage) -> None:
    """Check that two AImages differ in the precision of their tensors only. Raises FormatError."""
    if variant.subject is not None and variant.subject.digest != descriptor.digest:
        raise FormatError(f"its subject is {variant.subject.digest}")
    for key in _SAME:
        if base.properties.get(key) != variant.properties.get(key):
            raise FormatError(f"it has another {key}")
    layers = {layer.name: layer for layer in variant.layers}
    if unmatched := {layer.name for layer in base.layers} ^ layers.keys():
        raise FormatError(f"only one of them has {min(unmatched)[:200]}")
    for layer in base.layers:
        variant_layer = layers[layer.name]
        is_cast = layer.is_tensor and (layer.dtype is None or layer.dtype != variant_layer.dtype)
        if variant_layer.shape != layer.shape or not (
            is_cast or variant_layer.descriptor == layer.descriptor
        ):
            raise FormatError(f"{layer.name[:200]} differs")

"""sign: attach a signature to an artifact, in its registry or in the store.

The signature is a separate artifact, whose subject is the signed manifest; that does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clowder_aimage.content import Overlay, copy, plan_copy
from clowder_aimage.content.store import Target
from clowder_aimage.errors import NotFoundError, RegistryError, UsageError
from clowder_aimage.exporter.digest import hash_stored_files
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_manifest
from clowder_aimage.oci import Descriptor, Manifest, Reference, mediatype
from clowder_aimage.oci.artifact import EMPTY, build_artifact
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.trust import simple_signing
from clowder_aimage.trust.acceptance import Format
from clowder_aimage.trust.bundle import (
    MAX_BUNDLE,
    MEDIA_TYPE,
    build_certificate_bundle,
    build_key_bundle,
)
from clowder_aimage.trust.dsse import IN_TOTO, Envelope, encode_pae
from clowder_aimage.trust.oms import IGNORED, PREDICATE, build_files_statement
from clowder_aimage.trust.signer import Signer
from clowder_aimage.trust.statement import COSIGN_SIGN, build_cosign_statement

# Returns the bundle of a statement.
SignStatement = Callable[[bytes], bytes]
# Annotations of the manifest of a bundle (sigstore/cosign, specs/BUNDLE_SPEC.md)
_CONTENT, _PREDICATE = "dev.sigstore.bundle.content", "dev.sigstore.bundle.predicateType"
# Two signers may set the tag at the same time.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Signature:
    """A signed manifest, and the manifest of its signature."""

    subject: Descriptor
    manifest: Descriptor


def sign_with(signer: Signer, kind: Format) -> SignStatement:
    """Return the function that makes bundles with a key, or with its certificates."""

    def sign_statement(statement: bytes) -> bytes:
        signature = signer.sign(encode_pae(IN_TOTO, statement))
        envelope = Envelope(IN_TOTO, statement, signature)
        if signer.certificates:
            stamps = signer.stamp(signature)
            return build_certificate_bundle(envelope, signer.certificates, stamps)
        key = signer.public_key
        return build_key_bundle(envelope, key.pem_hint if kind is Format.OMS else key.der_hint)

    return sign_statement


def sign(
    layout: ImageLayout,
    reference: Reference,
    connection: ClientOptions | None,
    sign_statement: SignStatement,
    kind: Format = Format.BUNDLE,
) -> list[Signature]:
    """Attach bundles to ``reference`` in its registry, or without ``connection`` in the store.

    An index is signed with all its manifests, so that each of them verifies by its own digest. With
    ``kind`` OMS, the signature is over the files of the AImage as ``export`` writes them, which the
    store must have.

    Raises:
        UsageError: the reference has no registry host, or its files cannot be signed.
        NotFoundError: it does not exist, or the store lacks the files.
        UnauthorizedError, NetworkError, RegistryError, StoreError: the signature is not stored.
    """

    def run(target: Target) -> list[Signature]:
        root = target.resolve(reference)
        signatures = []
        # Children first: a signed index never has an unsigned manifest.
        for subject in _list_documents(target, root):
            if kind is Format.OMS:
                if subject.media_type in mediatype.INDEXES:
                    continue
                statement = _build_files_statement(layout, reference, subject)
                predicate = PREDICATE
            else:
                statement, predicate = build_cosign_statement(subject.digest), COSIGN_SIGN
            bundle = sign_statement(statement)
            signatures.append(_attach_bundle(target, reference, subject, bundle, predicate))
        return signatures

    if connection is None:
        return run(layout)
    with Repository(reference, connection) as repository:
        return run(repository)


def sign_tag(
    layout: ImageLayout, reference: Reference, connection: ClientOptions | None, signer: Signer
) -> list[Signature]:
    """Add a signature in cosign's older form to the tag of the manifest. Raises as ``sign``."""

    def run(target: Target) -> list[Signature]:
        root = target.resolve(reference)
        return [
            _add_tagged(target, reference, subject, signer)
            for subject in _list_documents(target, root)
        ]

    if connection is None:
        return run(layout)
    with Repository(reference, connection) as repository:
        return run(repository)


def build_files_bundle(
    layout: ImageLayout, reference: Reference, sign_statement: SignStatement
) -> bytes:
    """Return the bundle over the files of an AImage in the store. Raises as ``sign``."""
    return sign_statement(_build_files_statement(layout, reference, layout.resolve(reference)))


def _list_documents(target: Target, root: Descriptor) -> Sequence[Descriptor]:
    """Return the manifest, or the manifests of an index and that at the end."""
    return [content for content, _ in plan_copy(target, root, is_sparse=True).documents]


def _build_files_statement(layout: ImageLayout, reference: Reference, subject: Descriptor) -> bytes:
    try:
        digests = hash_stored_files(layout, reference, subject)
    except NotFoundError as error:
        raise NotFoundError(
            f"the files of {reference} cannot be signed: {error.message}", remedy="sign_files"
        ) from None
    # Readers of the specification leave these out.
    files = {
        path: digest for path, digest in digests.items() if path.split("/", 1)[0] not in IGNORED
    }
    name = reference.repository.rpartition("/")[2]
    return build_files_statement(name, files, subject.digest)


def _attach_bundle(
    target: Target, reference: Reference, subject: Descriptor, bundle: bytes, predicate: str
) -> Signature:
    if len(bundle) > MAX_BUNDLE:
        raise UsageError(
            f"the signature of {reference} has {len(bundle)} bytes: readers accept {MAX_BUNDLE}",
            hint="the model has too many files; sign its manifest instead",
        )
    layer = Descriptor.of(MEDIA_TYPE, bundle)
    annotations = {_CONTENT: "dsse-envelope", _PREDICATE: predicate}
    manifest = build_artifact(MEDIA_TYPE, [layer], subject, annotations)
    source = Overlay.of(manifest, EMPTY, {layer.digest: bundle})
    copy(source, reference.with_digest(manifest.digest), target)
    return Signature(subject, manifest.descriptor)


def _add_tagged(
    target: Target, reference: Reference, subject: Descriptor, signer: Signer
) -> Signature:
    payload = simple_signing.build_payload(subject.digest, reference.name)
    signature = signer.sign(payload, "sha256")
    stamps = signer.stamp(signature)
    tagged = simple_signing.TaggedSignature(signature, signer.certificates, stamps)
    layer = tagged.build_layer(payload)
    tag = simple_signing.build_signature_tag(subject.digest)
    name = Reference(reference.registry, reference.repository, tag)
    for _ in range(_ATTEMPTS):
        manifest, config = _build_tagged([*_read_tagged(target, name), layer])
        copy(Overlay.of(manifest, config, {layer.digest: payload}), name, target)
        if layer.annotations in [entry.annotations for entry in _read_tagged(target, name)]:
            return Signature(subject, manifest.descriptor)
    raise RegistryError(
        f"the signature of {subject.digest} is missing from the tag {tag} after {_ATTEMPTS} "
        "attempts",
        hint="other clients may be adding theirs at the same time; try again",
    )


def _read_tagged(target: Target, name: Reference) -> Sequence[Descriptor]:
    try:
        return read_manifest(target, target.resolve(name)).layers
    except NotFoundError:
        return ()


def _build_tagged(layers: Sequence[Descriptor]) -> tuple[Manifest, bytes]:
    """Return the manifest of signatures, and its config, as cosign writes them."""
    config = encode(
        {
            "architecture": "",
            "created": "0001-01-01T00:00:00Z",
            "os": "",
            "rootfs": {"type": "layers", "diff_ids": [str(layer.digest) for layer in layers]},
            "config": {},
        }
    )
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": Descriptor.of(mediatype.OCI_CONFIG, config).to_json(),
        "layers": [layer.to_json() for layer in layers],
    }
    return Manifest.build(document), config

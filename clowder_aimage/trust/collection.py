"""The signatures of a manifest, in a registry or in the store.

Bundles are referrers of the manifest, cosign's older signatures are under a tag. What is read is
bounded: MAX_REFERRERS entries, bundles of MAX_BUNDLE bytes, and DEADLINE seconds. More than that is
an error, because a signature beyond the bound could be the only good one, or none.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import copy_context
from datetime import datetime
from typing import TypeVar

from clowder_aimage.content.gate import unchecked
from clowder_aimage.content.store import Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import (
    FormatError,
    NotFoundError,
    SignatureError,
    UsageError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.attachment import list_attachments
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.registry import Repository
from clowder_aimage.trust import simple_signing
from clowder_aimage.trust.acceptance import (
    AcceptedSignature,
    Format,
    HashFiles,
    Signers,
    accept_bundle,
    accept_payload,
)
from clowder_aimage.trust.bundle import MAX_BUNDLE, MEDIA_TYPE
from clowder_aimage.trust.simple_signing import build_signature_tag

MAX_REFERRERS = 1000
# The types of referrers that are copied with their subjects
CARRIED = (MEDIA_TYPE, mediatype.AIMAGE_DERIVATION)
# Seconds for all signatures of a manifest.
DEADLINE = 10.0
_MAX_REASONS = 5
# cosign and oras state the type, other clients do not.
_LAYERS = (MEDIA_TYPE, "application/octet-stream")
# The next signature may be a good one; other errors are those of the place.
_REJECTIONS = (FormatError, VerificationError, NotFoundError)
_T = TypeVar("_T")


class SignaturePlace(ABC):
    """A place with the signatures of manifests."""

    def __init__(self, source: Source) -> None:
        self._source = source
        # The manifest that was read last, and then its blobs
        self.last = list[tuple[Descriptor, bytes]]()

    @abstractmethod
    def list_bundles(self, subject: Digest) -> Sequence[Descriptor]:
        """Return the referrers with a bundle. Raises AccessError, FormatError."""

    @abstractmethod
    def find_tagged(self, subject: Digest) -> Descriptor | None:
        """Return the manifest under the tag of cosign's older signatures. Raises AccessError."""

    def read_manifest(self, content: Descriptor) -> Manifest:
        """Read the manifest of a signature. Raises AccessError, ContentError."""
        raw = read_all(self._source.open(content), content, MAX_BUNDLE)
        self.last = [(content, raw)]
        return Manifest.parse(raw, content.media_type)

    def read_blob(self, content: Descriptor) -> bytes:
        """Read a bundle or a payload. Raises AccessError, ContentError."""
        raw = read_all(self._source.open(content), content, MAX_BUNDLE)
        self.last.append((content, raw))
        return raw


class RegistryPlace(SignaturePlace):
    """The repository of ``reference``, with referrers of these types."""

    def __init__(
        self,
        repository: Repository,
        reference: Reference,
        *,
        types: Collection[str] = (MEDIA_TYPE,),
    ) -> None:
        super().__init__(repository)
        self._types = types
        self._repository, self._reference = repository, reference

    def list_bundles(self, subject: Digest) -> Sequence[Descriptor]:
        # A registry may filter wrongly: the type is compared here, after the count.
        listed = self._repository.list_referrers(subject, limit=MAX_REFERRERS)
        return [entry for entry in listed if entry.extra.get("artifactType") in self._types]

    def find_tagged(self, subject: Digest) -> Descriptor | None:
        reference = self._reference
        tag = build_signature_tag(subject)
        try:
            return self._repository.resolve(
                Reference(reference.registry, reference.repository, tag)
            )
        except NotFoundError:
            return None


class StorePlace(SignaturePlace):
    """The store, with the signatures under any name of it."""

    def __init__(self, layout: ImageLayout) -> None:
        super().__init__(layout)
        self._layout = layout

    def list_bundles(self, subject: Digest) -> Sequence[Descriptor]:
        found: dict[Digest, Descriptor] = {}
        for _, entry in self._layout.iter_entries():
            if entry.extra.get("artifactType") == MEDIA_TYPE and entry.digest not in found:
                try:
                    manifest = self.read_manifest(entry)
                except _REJECTIONS:
                    # It may be of another manifest.
                    continue
                if manifest.subject is not None and manifest.subject.digest == subject:
                    found[entry.digest] = entry
                if len(found) > MAX_REFERRERS:
                    raise SignatureError(f"{subject} has over {MAX_REFERRERS} signatures")
        return list(found.values())

    def find_tagged(self, subject: Digest) -> Descriptor | None:
        end = f":{build_signature_tag(subject)}"
        named = (entry for name, entry in self._layout.list_tags() if name.endswith(end))
        return next(named, None)


def iter_carried(
    layout: ImageLayout, reference: Reference, subjects: Collection[Digest]
) -> Iterator[tuple[Reference, Descriptor]]:
    """Yield what travels with manifests of a store: signatures, and statements of derivations.

    They have their names there, and attached ones the name of ``reference`` with their digests.
    """
    names = dict(_iter_named(layout, subjects))
    yield from names.items()
    known = {entry.digest for entry in names.values()}
    for subject in sorted(subjects):
        for entry in list_attachments(layout.roots, subject):
            if entry.digest not in known:
                yield reference.with_digest(entry.digest), entry


def _iter_named(
    layout: ImageLayout, subjects: Collection[Digest]
) -> Iterator[tuple[Reference, Descriptor]]:
    tags = {build_signature_tag(subject) for subject in subjects}
    place = StorePlace(layout)
    for name, entry in layout.list_tags():
        is_bundle = entry.extra.get("artifactType") in CARRIED
        # Stores may have 100,000 names.
        if not is_bundle and not name.endswith(".sig"):
            continue
        try:
            reference = Reference.parse(name)
            if is_bundle:
                with unchecked():
                    subject = place.read_manifest(entry).subject
                if subject is not None and subject.digest in subjects:
                    yield reference, entry
            elif reference.tag in tags:
                yield reference, entry
        except (UsageError, *_REJECTIONS):
            # Another tool's name, or a damaged signature, which is none
            continue


def find_signature(
    place: SignaturePlace, subject: Digest, signers: Signers, now: datetime
) -> AcceptedSignature:
    """Return the first signature of ``subject`` by an expected signer.

    Raises SignatureError: there is none, or a bound is reached; UsageError: a library or a root is
    missing; AccessError: the place does not answer.
    """

    def search() -> AcceptedSignature:
        reasons = list[str]()
        for accepted in _iter_attempts(place, subject, signers, now, reasons):
            return accepted
        raise _build_error(subject, reasons)

    return run_bounded(search, subject)


def list_signatures(
    place: SignaturePlace,
    subject: Digest,
    signers: Signers,
    now: datetime,
    hash_files: HashFiles | None = None,
) -> tuple[list[AcceptedSignature], list[str]]:
    """Return all accepted signatures, and why others are not. Raises as ``find_signature``.

    With ``hash_files`` there is no deadline: the time of hashing depends on the model.
    """

    def search() -> tuple[list[AcceptedSignature], list[str]]:
        reasons = list[str]()
        attempts = _iter_attempts(place, subject, signers, now, reasons, hash_files)
        return list(attempts), reasons

    return run_bounded(search, subject) if hash_files is None else search()


def _build_error(subject: Digest, reasons: Sequence[str]) -> SignatureError:
    if not reasons:
        return SignatureError(f"{subject} has no signature", remedy="sign")
    more = f"; and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
    listed = "; ".join(reasons[:_MAX_REASONS])
    return SignatureError(f"{subject} has no signature of an expected signer: {listed}{more}")


def _iter_attempts(
    place: SignaturePlace,
    subject: Digest,
    signers: Signers,
    now: datetime,
    reasons: list[str],
    hash_files: HashFiles | None = None,
) -> Iterator[AcceptedSignature]:
    """Yield the accepted signatures; add the reasons of the others to ``reasons``."""
    if signers.formats & {Format.BUNDLE, Format.OMS}:
        for entry in place.list_bundles(subject):
            try:
                raw = _read_bundle(place, entry, subject)
                yield accept_bundle(raw, subject, signers, now, hash_files)
            except _REJECTIONS as error:
                reasons.append(f"{entry.digest.short}: {error.message}")
    if Format.COSIGN_TAG in signers.formats and signers.keys:
        yield from _iter_tagged(place, subject, signers, reasons)


def _read_bundle(place: SignaturePlace, entry: Descriptor, subject: Digest) -> bytes:
    manifest = place.read_manifest(entry)
    # A list of referrers is what a registry states.
    if manifest.subject is None or manifest.subject.digest != subject:
        raise FormatError("its manifest has another subject")
    if len(manifest.layers) != 1 or manifest.layers[0].media_type not in _LAYERS:
        raise FormatError("its manifest has not exactly one bundle")
    (layer,) = manifest.layers
    if layer.size > MAX_BUNDLE:
        raise FormatError(f"its bundle has {layer.size} bytes, the limit is {MAX_BUNDLE}")
    return place.read_blob(layer)


def _iter_tagged(
    place: SignaturePlace, subject: Digest, signers: Signers, reasons: list[str]
) -> Iterator[AcceptedSignature]:
    content = place.find_tagged(subject)
    if content is None:
        return
    try:
        layers = place.read_manifest(content).layers
    except _REJECTIONS as error:
        reasons.append(f"{content.digest.short}: {error.message}")
        return
    if len(layers) > MAX_REFERRERS:
        raise SignatureError(f"{subject} has over {MAX_REFERRERS} signatures")
    for layer in layers:
        if layer.media_type != simple_signing.MEDIA_TYPE:
            continue
        try:
            signature = simple_signing.read_signature(layer)
            if layer.size > MAX_BUNDLE:
                raise FormatError(f"its payload has {layer.size} bytes, the limit is {MAX_BUNDLE}")
            yield accept_payload(place.read_blob(layer), signature, subject, signers)
        except _REJECTIONS as error:
            reasons.append(f"{layer.digest.short}: {error.message}")


def run_bounded(search: Callable[[], _T], subject: Digest, seconds: float = DEADLINE) -> _T:
    """Return the result of a search, which is abandoned after ``seconds``.

    Raises SignatureError: it has not ended; the errors of the search.
    """
    results, errors = list[_T](), list[BaseException]()

    def run() -> None:
        try:
            results.append(search())
        # Any error: the caller raises it.
        except BaseException as error:
            errors.append(error)

    # Another thread, because one request may wait longer than all of them may.
    context = copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="signatures", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise SignatureError(
            f"the signatures of {subject} were not read within {seconds:g} seconds"
        )
    return results[0]

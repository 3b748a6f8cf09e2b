"""Decisions about signatures: by whom they are, and over what. Pure, but for roots in files.

A signature that is not accepted raises FormatError with the reason; callers try the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Digest
from clowder_aimage.trust import simple_signing
from clowder_aimage.trust.bundle import Bundle, Method
from clowder_aimage.trust.certificate import Identity, find_issuer, verify_chain
from clowder_aimage.trust.key import PublicKey, verifies
from clowder_aimage.trust.oms import PREDICATE, SignedFiles
from clowder_aimage.trust.simple_signing import TaggedSignature
from clowder_aimage.trust.statement import COSIGN_SIGN, Statement
from clowder_aimage.trust.timestamp import find_stamped_time


class Format(StrEnum):
    """A form of signatures: cosign's bundle, cosign's older tag, or OpenSSF Model Signing."""

    BUNDLE = "bundle"
    COSIGN_TAG = "cosign-tag"
    OMS = "oms"


@dataclass(frozen=True, slots=True)
class Signers:
    """The expected signers. ``roots`` are certificates of authorities in DER.

    An identity with an issuer is that of a keyless signature, one without that of a certificate
    below ``roots``, which may have expired since a time that an authority below ``stamp_roots``
    states. ``trusted_root`` is the file of sigstore's keys.
    """

    keys: tuple[PublicKey, ...] = ()
    roots: tuple[bytes, ...] = ()
    identities: tuple[Identity, ...] = ()
    trusted_root: Path | None = None
    offline: bool = False
    formats: frozenset[Format] = frozenset(Format)
    stamp_roots: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptedSignature:
    """A signature of an expected signer.

    ``signer`` is the fingerprint of a key or an identity, with the ``issuer`` of the latter.
    ``time`` is the verified time of the signature, or None if nothing proves it. ``files`` counts
    the files of a model's signature.
    """

    format: Format
    method: Method
    signer: str
    issuer: str
    time: datetime | None
    subject: Digest | None
    files: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the signature for programs."""
        value: dict[str, Any] = {
            "format": self.format.value,
            "method": self.method.value,
            "signer": self.signer,
        }
        if self.issuer:
            value["issuer"] = self.issuer
        if self.time is not None:
            value["time"] = self.time.isoformat().replace("+00:00", "Z")
        if self.subject is not None:
            value["digest"] = str(self.subject)
        return value | ({"files": self.files} if self.files else {})


# Returns the hex digests of the files of a model by their paths, by the name of a hash.
HashFiles = Callable[[str], Mapping[str, str]]


def accept_bundle(
    raw: bytes,
    subject: Digest,
    signers: Signers,
    now: datetime,
    hash_files: HashFiles | None = None,
) -> AcceptedSignature:
    """Verify a bundle over the manifest ``subject``. Raises FormatError, UsageError.

    A signature of files is compared with those of the manifest, by ``hash_files``. Without that it
    counts if its signer states that they are those of the manifest.
    """
    bundle = Bundle.parse(raw)
    envelope = bundle.envelope
    # Parsed before the signature, which may take a log's keys, and used only after it.
    statement = Statement.parse(envelope.payload_type, envelope.payload)
    kind = _find_format(statement)
    _check_format(kind, signers)
    if kind is Format.BUNDLE:
        if not statement.covers(subject):
            raise FormatError("it is a signature of another digest")
        return _verify(bundle, kind, signers, now, subject, 0)
    files = SignedFiles.parse(statement)
    if files.manifest not in (None, subject):
        raise FormatError(f"it is a signature of the files of {files.manifest}")
    if files.manifest is None and hash_files is None:
        raise FormatError("it is a signature of files, without a statement about this manifest")
    accepted = _verify(bundle, kind, signers, now, subject, len(files.digests))
    if hash_files is not None:
        files.compare(hash_files(files.hash_type))
    return accepted


def accept_files(
    raw: bytes, signers: Signers, now: datetime
) -> tuple[AcceptedSignature, SignedFiles]:
    """Verify a bundle over files, and return them. Raises FormatError, UsageError."""
    bundle = Bundle.parse(raw)
    statement = Statement.parse(bundle.envelope.payload_type, bundle.envelope.payload)
    files = SignedFiles.parse(statement)
    _check_format(Format.OMS, signers)
    accepted = _verify(bundle, Format.OMS, signers, now, files.manifest, len(files.digests))
    return accepted, files


def accept_payload(
    payload: bytes, tagged: TaggedSignature, subject: Digest, signers: Signers, now: datetime
) -> AcceptedSignature:
    """Verify a signature of cosign's older form, by a key or a certificate. Raises FormatError."""
    kind = Format.COSIGN_TAG
    _check_format(kind, signers)
    if simple_signing.parse_payload(payload) != subject:
        raise FormatError("it is a signature of another digest")
    # cosign hashes with SHA-256, whatever the curve.
    signed = _Signed(tagged.signature, payload, tagged.certificates, tagged.stamps, "sha256")
    for key in signers.keys:
        if key.verifies(tagged.signature, payload, signed.hash_name):
            signer = f"sha256:{key.fingerprint}"
            return AcceptedSignature(kind, Method.KEY, signer, "", None, subject)
    if tagged.certificates and signers.roots:
        signer, time = _verify_certificate(signed, signers, now)
        return AcceptedSignature(kind, Method.CERTIFICATE, signer, "", time, subject)
    raise FormatError("it is by none of the expected keys")


class _Signed(NamedTuple):
    """A message with its signature and what belongs to that; an empty hash is that of the curve."""

    signature: bytes
    message: bytes
    certificates: tuple[bytes, ...]
    stamps: tuple[bytes, ...]
    hash_name: str = ""


def _find_format(statement: Statement) -> Format:
    if statement.predicate_type == COSIGN_SIGN:
        return Format.BUNDLE
    if statement.predicate_type == PREDICATE:
        return Format.OMS
    raise FormatError(f"it is not a signature, but states {statement.predicate_type[:100]!r}")


def _check_format(kind: Format, signers: Signers) -> None:
    if kind not in signers.formats:
        raise FormatError(f"signatures in the form {kind} are not accepted")


def _verify(
    bundle: Bundle,
    kind: Format,
    signers: Signers,
    now: datetime,
    subject: Digest | None,
    files: int,
) -> AcceptedSignature:
    if bundle.method is Method.KEY:
        return _verify_key(bundle, kind, signers, subject, files)
    if bundle.method is Method.CERTIFICATE:
        envelope = bundle.envelope
        signed = _Signed(envelope.signature, envelope.signed, bundle.certificates, bundle.stamps)
        subject_name, time = _verify_certificate(signed, signers, now)
        return AcceptedSignature(kind, bundle.method, subject_name, "", time, subject, files)
    expected = [identity for identity in signers.identities if identity.issuer]
    if not expected:
        raise FormatError("it is a keyless signature, and no identity with an issuer is expected")
    from clowder_aimage.trust.keyless import verify_keyless

    signer = verify_keyless(bundle, expected, signers.trusted_root, offline=signers.offline)
    return AcceptedSignature(
        kind, Method.KEYLESS, signer.subject, signer.issuer, signer.time, subject, files
    )


def _verify_key(
    bundle: Bundle, kind: Format, signers: Signers, subject: Digest | None, files: int
) -> AcceptedSignature:
    envelope = bundle.envelope
    for key in signers.keys:
        if key.verifies(envelope.signature, envelope.signed):
            signer = f"sha256:{key.fingerprint}"
            return AcceptedSignature(kind, Method.KEY, signer, "", None, subject, files)
    raise FormatError("it is by none of the expected keys")


def _verify_certificate(
    signed: _Signed, signers: Signers, now: datetime
) -> tuple[str, datetime | None]:
    """Return the identity of a signature with a certificate, and its time if a stamp proves it."""
    if not signers.roots:
        raise FormatError("it has a certificate, and no authority is expected")
    time = find_stamped_time(signed.stamps, signed.signature, signers.stamp_roots)
    try:
        leaf, subjects = verify_chain(signed.certificates, signers.roots, time or now)
    except FormatError as error:
        if not signed.stamps or time is not None:
            raise
        raise FormatError(
            f"{error.message}; its time stamp is not by an expected authority, or of another "
            "signature"
        ) from None
    expected = [identity for identity in signers.identities if not identity.issuer]
    issuer = find_issuer(leaf)
    if not any(identity.matches(subjects, issuer) for identity in expected):
        raise FormatError(f"it is of {', '.join(subjects)[:200]}, who is not expected")
    key = leaf.public_key()
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    if not isinstance(key, EllipticCurvePublicKey) or key.curve.key_size not in (256, 384, 521):
        raise FormatError("the key in the signer's certificate is not supported")
    if not verifies(key, signed.signature, signed.message, signed.hash_name):
        raise FormatError("its signature does not match")
    return subjects[0], time

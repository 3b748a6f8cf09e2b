"""Signatures by an identity instead of a key, with sigstore's library.

The certificate is valid for minutes; an entry of a transparency log or a signed time stamp shows
that the signature was made in that time. All of it is verified without the network, by the keys in
a file of trusted roots (sigstore/protobuf-specs, sigstore_trustroot.proto).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    UnauthorizedError,
    UsageError,
    needs,
)
from clowder_aimage.trust.bundle import Bundle
from clowder_aimage.trust.certificate import Identity, find_issuer, list_subjects

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from sigstore.sign import SigningContext
    from sigstore.verify import Verifier

_SUBJECT, _EXTRA = "a keyless signature", "trust"


class KeylessSigner(NamedTuple):
    """The identity of a verified signature, its issuer, and the verified time of the signature."""

    subject: str
    issuer: str
    time: datetime


def verify_keyless(
    bundle: Bundle, identities: Sequence[Identity], trusted_root: Path | None, *, offline: bool
) -> KeylessSigner:
    """Verify the certificate, the log's entry and the signature of a bundle, as one.

    Without a file of trusted roots, those of the public instance of sigstore are used, as the
    library has them; they are refreshed unless ``offline``.

    Raises:
        UsageError: the library is missing, or the trusted root cannot be read.
        FormatError: the bundle does not verify, or is of another identity.
    """
    verifier = _open_verifier(trusted_root, offline=offline)
    with needs(_SUBJECT, _EXTRA):
        from sigstore.errors import Error, VerificationError
        from sigstore.models import Bundle as SigstoreBundle
    policy = _IdentityPolicy(identities, VerificationError)
    try:
        parsed = SigstoreBundle.from_json(bundle.raw)
        payload_type, payload = verifier.verify_dsse(parsed, policy)
    except Error as error:
        raise FormatError(f"the keyless signature is not accepted: {error}") from None
    # Malformed parts of a bundle raise the errors of several parsers.
    except Exception as error:
        if isinstance(error, AImageError):
            raise
        reason = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(f"the keyless signature is malformed: {reason}") from None
    if (payload_type, payload) != (bundle.envelope.payload_type, bundle.envelope.payload):
        raise FormatError("the keyless signature is of another payload")
    _check_entry(bundle)
    # Those that were verified: the log's, by its promise, and stamps of expected authorities
    times = [each.time for each in verifier._establish_time(parsed)]  # noqa: SLF001 - no other way
    return KeylessSigner(policy.subject, policy.issuer, min(times))


def _check_entry(bundle: Bundle) -> None:
    """Raise FormatError unless the log's entry names this payload and this signature.

    The library compares both, too. Its entries differ by version, and a bundle with parts of
    several entries was once accepted by another reader.
    """
    material = read_json(bundle.raw, "the bundle")["verificationMaterial"]
    body = base64.b64decode(material["tlogEntries"][0].get("canonicalizedBody") or "")
    text = body.decode(errors="replace")
    envelope = bundle.envelope
    digests = [
        form
        for data in (envelope.payload, envelope.signed)
        for form in (
            hashlib.sha256(data).hexdigest(),
            base64.b64encode(hashlib.sha256(data).digest()).decode(),
            base64.b64encode(hashlib.sha384(data).digest()).decode(),
            base64.b64encode(hashlib.sha512(data).digest()).decode(),
        )
    ]
    has_signature = base64.b64encode(envelope.signature).decode() in text
    if not has_signature or not any(digest in text for digest in digests):
        raise FormatError("the log's entry is of another signature")


def _open_verifier(trusted_root: Path | None, *, offline: bool) -> Verifier:
    with needs(_SUBJECT, _EXTRA):
        from sigstore.models import TrustedRoot
        from sigstore.verify import Verifier
    try:
        if trusted_root is not None:
            return Verifier(trusted_root=TrustedRoot.from_file(str(trusted_root)))
        return Verifier.production(offline=offline)
    # A file that is not one raises errors of several parsers.
    except Exception as error:
        if trusted_root is not None:
            raise UsageError(f"{trusted_root} is not a file of trusted roots: {error}") from None
        raise NetworkError(
            f"the trusted roots of sigstore cannot be fetched: {error}",
            hint="name a file of trusted roots",
        ) from None


class _IdentityPolicy:
    """The library's interface for a decision about the signer's certificate."""

    def __init__(
        self, identities: Sequence[Identity], build_error: Callable[[str], Exception]
    ) -> None:
        self._identities, self._build_error = identities, build_error
        self.subject = self.issuer = ""

    def verify(self, cert: Certificate) -> None:
        """Raise the library's error unless an identity matches."""
        subjects, self.issuer = list_subjects(cert), find_issuer(cert)
        if not any(identity.matches(subjects, self.issuer) for identity in self._identities):
            raise self._build_error(
                f"it is of {', '.join(subjects)[:200]} by {self.issuer[:200]}, who is not expected"
            )
        self.subject = subjects[0]


class Instance(NamedTuple):
    """An instance of sigstore: the file of its addresses and that of its keys."""

    signing_config: Path
    trusted_root: Path


def sign_keyless(statement: bytes, token: str | None, instance: Instance | None = None) -> bytes:
    """Return the bundle of a statement, signed with an identity token.

    The token is by default that of the environment, such as of a job of GitHub Actions. The
    certificate and the log's entry are requested of an instance of sigstore, by default of the
    public one, where the identity and the digest become public.

    Raises UsageError, UnauthorizedError, NetworkError.
    """
    with needs(_SUBJECT, _EXTRA):
        from sigstore import dsse
        from sigstore.oidc import IdentityToken, detect_credential
    try:
        token = token or detect_credential()
        if token is None:
            raise UsageError(
                "there is no identity token",
                hint="set SIGSTORE_ID_TOKEN, or run where the environment has one, such as a job "
                "of GitHub Actions with the permission id-token: write",
            )
        context = _open_signing_context(instance)
        with context.signer(IdentityToken(token)) as signer:
            return signer.sign_dsse(dsse.Statement(statement)).to_json().encode()
    except OSError as error:
        raise NetworkError(f"sigstore cannot be reached: {error}") from None
    except Exception as error:
        if isinstance(error, AImageError):
            raise
        raise UnauthorizedError(f"sigstore has refused to sign: {error}") from None


def _open_signing_context(instance: Instance | None) -> SigningContext:
    from sigstore.models import ClientTrustConfig, SigningConfig, TrustedRoot
    from sigstore.sign import SigningContext

    if instance is None:
        return SigningContext.from_trust_config(ClientTrustConfig.production())
    try:
        config = SigningConfig.from_file(str(instance.signing_config))
        root = TrustedRoot.from_file(str(instance.trusted_root))
    # Files that are none raise errors of several parsers.
    except Exception as error:
        names = " or ".join(map(str, instance))
        raise UsageError(f"{names} is not a file of an instance of sigstore: {error}") from None
    return SigningContext(
        fulcio=config.get_fulcio(),
        rekor=config.get_tlogs()[0],
        trusted_root=root,
        tsa_clients=config.get_tsas(),
    )

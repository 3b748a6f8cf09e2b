"""Certificates of signers: their chain to a known root, and the identities in them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import FormatError, UsageError, needs
from clowder_aimage.trust.key import PublicKey

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

# OIDs of Fulcio (sigstore/fulcio, docs/oid-info.md): the issuer of the identity token, as an
# UTF8String in DER and, in older certificates, as plain bytes.
_ISSUER, _OLD_ISSUER = "1.3.6.1.4.1.57264.1.8", "1.3.6.1.4.1.57264.1.1"
_UTF8_STRING = 0x0C
# Certificates between the signer's and the root.
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """A pattern of identities: ``*`` in the subject stands for any text; the issuer is exact.

    The issuer is that of the identity token; it is empty for certificates of other authorities.
    """

    subject: str
    issuer: str = ""

    def matches(self, subjects: Sequence[str], issuer: str) -> bool:
        """Return True if one of the subjects matches, and the issuer is this one."""
        pattern = self.subject.replace("[", "[[]").replace("?", "[?]")
        return self.issuer == issuer and any(fnmatchcase(text, pattern) for text in subjects)


def parse_certificates(data: bytes, name: str) -> tuple[bytes, ...]:
    """Return the certificates of a PEM file in DER. Raises UsageError."""
    with needs("a certificate", "trust"):
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding
    try:
        certificates = x509.load_pem_x509_certificates(data)
    except (ValueError, x509.InvalidVersion) as error:
        raise UsageError(f"{name} has no certificate in PEM: {error}") from None
    return tuple(certificate.public_bytes(Encoding.DER) for certificate in certificates)


def encode_pem(certificate: bytes) -> str:
    """Return a certificate in DER as PEM."""
    return ssl.DER_cert_to_PEM_cert(certificate)


def check_key(certificate: bytes, key: PublicKey, name: str) -> None:
    """Raise UsageError unless a certificate, in DER, is of a key."""
    from cryptography.x509 import load_der_x509_certificate

    if PublicKey.of(load_der_x509_certificate(certificate).public_key(), name) != key:
        raise UsageError(
            f"the first certificate in {name} is of another key",
            hint="put the signer's certificate first, then those up to one below the root",
        )


def verify_chain(
    chain: Sequence[bytes], roots: Sequence[bytes], time: datetime
) -> tuple[Certificate, list[str]]:
    """Return the signer's certificate of a chain that ends at a root, and its identities.

    All certificates must be valid at ``time``, and the first one be for signatures. Roots in the
    chain itself do not count.

    Raises FormatError.
    """
    from cryptography import x509
    from cryptography.x509 import verification

    try:
        leaf, *others = map(x509.load_der_x509_certificate, chain)
        trusted = list(map(x509.load_der_x509_certificate, roots))
        verifier = (
            verification.PolicyBuilder()
            .store(verification.Store(trusted))
            .time(time)
            .max_chain_depth(_MAX_DEPTH)
            .extension_policies(
                ca_policy=verification.ExtensionPolicy.permit_all().require_present(
                    x509.BasicConstraints, verification.Criticality.AGNOSTIC, _check_authority
                ),
                ee_policy=verification.ExtensionPolicy.permit_all(),
            )
            .build_client_verifier()
        )
        verifier.verify(leaf, others)
        _check_usage(leaf)
        # It may be of a kind that is not supported.
        leaf.public_key()
        return leaf, list_subjects(leaf)
    # Malformed certificates raise the errors of several parsers.
    except Exception as error:
        reason = str(error).replace("\n", " ")[:200]
        raise FormatError(f"the signer's certificate is not accepted: {reason}") from None


def _check_authority(_: Any, __: Any, constraints: Any) -> None:
    if not constraints.ca:
        raise ValueError("a certificate that is not of an authority has signed another one")


def _check_usage(leaf: Certificate) -> None:
    """Raise ValueError unless a certificate is for signatures, by one of its two extensions."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    for extension in leaf.extensions:
        value = extension.value
        if isinstance(value, x509.KeyUsage) and not value.digital_signature:
            raise ValueError("its key usage is not the signature")
        if isinstance(value, x509.ExtendedKeyUsage) and not (
            {ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}
            & set(value)
        ):
            raise ValueError("its extended key usage is not the signature of code")
        if isinstance(value, x509.BasicConstraints) and value.ca:
            raise ValueError("it is of an authority")
    kinds = {type(extension.value) for extension in leaf.extensions}
    if not kinds & {x509.KeyUsage, x509.ExtendedKeyUsage}:
        raise ValueError("its key usage is not stated")


def list_subjects(certificate: Certificate) -> list[str]:
    """Return the identities of a certificate: the alternative names, else its subject."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [certificate.subject.rfc4514_string()]
    return list(_iter_names(names))


def _iter_names(names: Any) -> Iterator[str]:
    from cryptography import x509

    for kind in (x509.RFC822Name, x509.UniformResourceIdentifier, x509.DNSName):
        yield from names.get_values_for_type(kind)


def find_issuer(certificate: Certificate) -> str:
    """Return the issuer of the identity token that Fulcio has recorded; empty without one."""
    from cryptography import x509

    values: dict[str, bytes] = {}
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.UnrecognizedExtension):
            values[extension.oid.dotted_string] = extension.value.value
    if (raw := values.get(_ISSUER)) is not None:
        return _read_utf8_string(raw)
    return values.get(_OLD_ISSUER, b"").decode(errors="replace")


def _read_utf8_string(raw: bytes) -> str:
    """Return the text of an UTF8String in DER. Raises FormatError."""
    size = len(raw) - 2
    if raw[:1] == bytes([_UTF8_STRING]) and 0 <= size < 0x80 and raw[1] == size:
        return raw[2:].decode(errors="replace")
    if raw[:2] == bytes([_UTF8_STRING, 0x81]) and len(raw) == 3 + raw[2]:
        return raw[3:].decode(errors="replace")
    raise FormatError("the issuer in the signer's certificate is malformed")

"""Keys and certificates of signers, in files."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from clowder_aimage.trust.key import PublicKey
from clowder_aimage.trust.signer import KeySigner

NOW = datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


def create_key(name: str, bits: int = 256) -> ec.EllipticCurvePrivateKey:
    """Return the key of that name, the same one in each call."""
    return _create_key(name, bits)


@cache
def _create_key(name: str, bits: int) -> ec.EllipticCurvePrivateKey:
    curves = {256: ec.SECP256R1(), 384: ec.SECP384R1(), 521: ec.SECP521R1()}
    return ec.generate_private_key(curves[bits])


def create_signer(name: str, bits: int = 256) -> KeySigner:
    return KeySigner(create_key(name, bits), name)


def get_public(name: str, bits: int = 256) -> PublicKey:
    return PublicKey.of(create_key(name, bits).public_key(), name)


def write_key(directory: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Write a key, and return the files of its private and its public part."""
    key = create_key(name)
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    public.write_bytes(get_public(name).pem)
    return private, public


@dataclass(frozen=True)
class Authority:
    """A root certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def build_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def create_authority(name: str = "root") -> Authority:
    key = create_key(f"{name} authority")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(build_name(name))
        .issuer_name(build_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 400 * DAY)
        .not_valid_after(NOW + 4000 * DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def create_certificate(
    authority: Authority,
    key: ec.EllipticCurvePrivateKey,
    subject: str = "signer@example.com",
    *,
    days: tuple[int, int] = (-1, 30),
    is_authority: bool = False,
    usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CODE_SIGNING,
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(build_name("intermediate" if is_authority else "signer"))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + days[0] * DAY)
        .not_valid_after(NOW + days[1] * DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(_usage(authority=is_authority), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(subject)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )


def encode_der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)

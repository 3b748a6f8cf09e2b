"""An authority that stamps times (RFC 3161), by tokens of CMS (RFC 5652)."""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.trust.key_files import (
    DAY,
    NOW,
    Authority,
    build_name,
    create_authority,
    create_key,
    encode_der,
)

_SHA256 = "2.16.840.1.101.3.4.2.1"
_SIGNED_DATA, _TST_INFO = "1.2.840.113549.1.7.2", "1.2.840.113549.1.9.16.1.4"
_CONTENT_TYPE, _DIGEST = "1.2.840.113549.1.9.3", "1.2.840.113549.1.9.4"
_ECDSA = "1.2.840.10045.4.3.2"
_SEQUENCE, _SET, _TAGGED = 0x30, 0x31, 0xA0


def _tlv(tag: int, *parts: bytes) -> bytes:
    data = b"".join(parts)
    size = len(data)
    length = size.to_bytes((size.bit_length() + 7) // 8 or 1, "big")
    return bytes([tag]) + (b"" if size < 0x80 else bytes([0x80 + len(length)])) + length + data


def _encode_number(number: int) -> bytes:
    return _tlv(0x02, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _encode_oid(text: str) -> bytes:
    first, second, *others = map(int, text.split("."))
    data = bytearray()
    for arc in (40 * first + second, *others):
        groups = [arc & 0x7F]
        while arc := arc >> 7:
            groups.append(0x80 | arc & 0x7F)
        data += bytes(reversed(groups))
    return _tlv(0x06, bytes(data))


class OwnTimestampAuthority:
    """The root of this name, and the certificate below it that stamps, valid for ``days``."""

    def __init__(self, name: str = "own", days: tuple[int, int] = (-4000, 4000)) -> None:
        self.root: Authority = create_authority(f"{name} stamp root")
        self._key: ec.EllipticCurvePrivateKey = create_key(f"{name} stamps")
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(build_name("stamps"))
            .issuer_name(self.root.certificate.subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW + days[0] * DAY)
            .not_valid_after(NOW + days[1] * DAY)
            .add_extension(usage, critical=True)
            .sign(self.root.key, hashes.SHA256())
        )

    def stamp(self, signature: bytes, time: datetime = NOW) -> bytes:
        """Return the response for a signature."""
        return self.respond(hashlib.sha256(signature).digest(), time)

    def respond(self, digest: bytes, time: datetime) -> bytes:
        """Return the response for the SHA-256 of a signature."""
        sha256 = _tlv(_SEQUENCE, _encode_oid(_SHA256))
        imprint = _tlv(_SEQUENCE, sha256, _tlv(0x04, digest))
        info = _tlv(
            _SEQUENCE,
            _encode_number(1),
            _encode_oid("1.2.3.4"),
            imprint,
            _encode_number(1),
            _tlv(0x18, f"{time:%Y%m%d%H%M%SZ}".encode()),
        )
        attributes = b"".join(
            _tlv(_SEQUENCE, _encode_oid(oid), _tlv(_SET, value))
            for oid, value in (
                (_CONTENT_TYPE, _encode_oid(_TST_INFO)),
                (_DIGEST, _tlv(0x04, hashlib.sha256(info).digest())),
            )
        )
        signed = self._key.sign(_tlv(_SET, attributes), ec.ECDSA(hashes.SHA256()))
        issuer = self.certificate.issuer.public_bytes()
        signer = _tlv(
            _SEQUENCE,
            _encode_number(1),
            _tlv(_SEQUENCE, issuer, _encode_number(self.certificate.serial_number)),
            sha256,
            _tlv(_TAGGED, attributes),
            _tlv(_SEQUENCE, _encode_oid(_ECDSA)),
            _tlv(0x04, signed),
        )
        data = _tlv(
            _SEQUENCE,
            _encode_number(3),
            _tlv(_SET, sha256),
            _tlv(_SEQUENCE, _encode_oid(_TST_INFO), _tlv(_TAGGED, _tlv(0x04, info))),
            _tlv(_TAGGED, encode_der(self.certificate)),
            _tlv(_SET, signer),
        )
        token = _tlv(_SEQUENCE, _encode_oid(_SIGNED_DATA), _tlv(_TAGGED, data))
        return _tlv(_SEQUENCE, _tlv(_SEQUENCE, _encode_number(0)), token)

    def write(self, directory: Path) -> dict[str, Path]:
        """Write the files of ``openssl ts``: its configuration, and the root."""
        names = ("config", "root", "certificate", "key", "serial")
        files = {name: directory / f"stamps-{name}" for name in names}
        files["root"].write_bytes(self.root.pem)
        files["certificate"].write_bytes(self.certificate.public_bytes(Encoding.PEM))
        key = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        files["key"].write_bytes(key)
        files["config"].write_text(
            f"""[tsa]
default_tsa = own
[own]
serial = {files["serial"]}
signer_cert = {files["certificate"]}
signer_key = {files["key"]}
signer_digest = sha256
default_policy = 1.2.3.4
digests = sha256, sha384, sha512
"""
        )
        return files

    def describe(self, encode: Any) -> dict[str, Any]:
        """Return the authority as a file of trusted roots has it."""
        chain = [encode_der(self.certificate), self.root.der]
        return {
            "subject": {"organization": "example", "commonName": "stamps"},
            "certChain": {"certificates": [{"rawBytes": encode(each)} for each in chain]},
            "validFor": {"start": "2010-01-01T00:00:00Z"},
        }

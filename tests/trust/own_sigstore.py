"""An instance of sigstore: an authority, a transparency log and a log of certificates.

It makes bundles as cosign 3 writes them: fulcio's certificate profile (sigstore/fulcio,
docs/certificate-specification.md) with an embedded SCT (RFC 6962, 3.3), and an entry ``dsse``
0.0.1 of Rekor with its promise, inclusion proof and checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from clowder_aimage.trust.bundle import MEDIA_TYPE
from clowder_aimage.trust.dsse import IN_TOTO, encode_pae
from tests.trust.key_files import NOW, Authority, create_authority, create_key, encode_der
from tests.trust.own_timestamp import OwnTimestampAuthority

IDENTITY, ISSUER = "builder@example.com", "https://issuer.example.com"
_LOG = "rekor.example.com"


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


class OwnSigstore:
    """The keys of an instance with this name, and what it issues."""

    def __init__(self, name: str = "own") -> None:
        self.fulcio: Authority = create_authority(f"{name} fulcio")
        self._log, self._certificates = create_key(f"{name} log"), create_key(f"{name} ct")

    def write_root(self, path: Path, *stamps: OwnTimestampAuthority) -> Path:
        """Write the file of trusted roots."""
        valid = {"start": "2020-01-01T00:00:00Z"}

        def describe(key: ec.EllipticCurvePrivateKey, host: str) -> dict[str, Any]:
            der = _encode_key(key)
            return {
                "baseUrl": f"https://{host}",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": encode(der),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": valid,
                },
                "logId": {"keyId": encode(hashlib.sha256(der).digest())},
            }

        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [describe(self._log, _LOG)],
            "certificateAuthorities": [
                {
                    "subject": {"organization": "example", "commonName": "fulcio"},
                    "uri": "https://fulcio.example.com",
                    "certChain": {"certificates": [{"rawBytes": encode(self.fulcio.der)}]},
                    "validFor": valid,
                }
            ],
            "ctlogs": [describe(self._certificates, "ct.example.com")],
            "timestampAuthorities": [each.describe(encode) for each in stamps],
        }
        path.write_text(json.dumps(root))
        return path

    def issue(
        self,
        key: ec.EllipticCurvePrivateKey | x509.CertificateSigningRequest,
        identity: str = IDENTITY,
        issuer: str = ISSUER,
        time: datetime = NOW,
    ) -> x509.Certificate:
        """Return a certificate of ten minutes, with its SCT."""
        name = issuer.encode()
        usage = x509.KeyUsage(True, *[False] * 8)
        public_key = key.public_key()
        assert isinstance(public_key, ec.EllipticCurvePublicKey)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.fulcio.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(time)
            .not_valid_after(time + timedelta(minutes=10))
            .add_extension(usage, critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.fulcio.key.public_key()),
                critical=False,
            )
            .add_extension(
                x509.UnrecognizedExtension(
                    x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8"), bytes([0x0C, len(name)]) + name
                ),
                critical=False,
            )
            # As older readers expect it
            .add_extension(
                x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1"), name),
                critical=False,
            )
        )
        before = builder.sign(self.fulcio.key, hashes.SHA256()).tbs_certificate_bytes
        milliseconds = int(time.timestamp() * 1000)
        head = struct.pack("!BBQH", 0, 0, milliseconds, 1)
        issuer_id = hashlib.sha256(_encode_key(self.fulcio.key)).digest()
        entry = head + issuer_id + len(before).to_bytes(3, "big") + before + b"\0\0"
        signature = _sign(self._certificates, entry)
        log_id = hashlib.sha256(_encode_key(self._certificates)).digest()
        sct = struct.pack("!B32sQHBBH", 0, log_id, milliseconds, 0, 4, 3, len(signature))
        sct += signature
        listed = struct.pack("!HH", len(sct) + 2, len(sct)) + sct
        octets = (
            bytes([0x04, len(listed)]) if len(listed) < 128 else bytes([0x04, 0x81, len(listed)])
        )
        oid = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
        extension = x509.UnrecognizedExtension(oid, octets + listed)
        return builder.add_extension(extension, critical=False).sign(
            self.fulcio.key, hashes.SHA256()
        )

    def record(
        self, payload: bytes, signature: bytes, certificate: x509.Certificate, time: datetime = NOW
    ) -> dict[str, Any]:
        """Return the log's entry of an envelope, the only one in the log."""
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        body = json.dumps(
            {
                "apiVersion": "0.0.1",
                "kind": "dsse",
                "spec": {
                    "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
                    "payloadHash": {
                        "algorithm": "sha256",
                        "value": hashlib.sha256(payload).hexdigest(),
                    },
                    "signatures": [{"signature": encode(signature), "verifier": encode(pem)}],
                },
            }
        ).encode()
        log_id = hashlib.sha256(_encode_key(self._log)).digest()
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"{_LOG} - 1\n1\n{encode(root)}\n"
        signed = encode(log_id[:4] + _sign(self._log, note.encode()))
        seconds = int(time.timestamp())
        promised = {
            "body": encode(body),
            "integratedTime": seconds,
            "logID": log_id.hex(),
            "logIndex": 0,
        }
        canonical = json.dumps(promised, separators=(",", ":"), sort_keys=True).encode()
        return {
            "logIndex": "0",
            "logId": {"keyId": encode(log_id)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(seconds),
            "inclusionPromise": {"signedEntryTimestamp": encode(_sign(self._log, canonical))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": encode(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n— {_LOG} {signed}\n"},
            },
            "canonicalizedBody": encode(body),
        }

    def sign(self, payload: bytes, **issued: Any) -> dict[str, Any]:
        """Return the bundle of a statement, as a JSON value."""
        key = create_key("keyless")
        signature = _sign(key, encode_pae(IN_TOTO, payload))
        certificate = self.issue(key, **issued)
        time = issued.get("time", NOW)
        return {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {
                "certificate": {"rawBytes": encode(encode_der(certificate))},
                "tlogEntries": [self.record(payload, signature, certificate, time)],
            },
            "dsseEnvelope": {
                "payload": encode(payload),
                "payloadType": IN_TOTO,
                "signatures": [{"sig": encode(signature)}],
            },
        }

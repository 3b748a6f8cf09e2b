"""Sigstore bundles of version 0.3 (sigstore/protobuf-specs, sigstore_bundle.proto).

OpenSSF Model Signing 1.0 and cosign 3 use the same bundles, with other statements in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.trust.dsse import Envelope, encode_base64, read_base64, read_object
from clowder_aimage.trust.timestamp import MAX_STAMPS

MEDIA_TYPE = mediatype.SIGSTORE_BUNDLE
_MEDIA_TYPES = (MEDIA_TYPE, "application/vnd.dev.sigstore.bundle+json;version=0.3")
# Bytes of a bundle.
MAX_BUNDLE = 1 << 20
_MAX_CERTIFICATES = 16


class Method(StrEnum):
    """The proof of the signer: a known key, a certificate of a known root, or an identity.

    An identity has a certificate that is valid for minutes, and an entry in a transparency log.
    """

    KEY = "key"
    CERTIFICATE = "certificate"
    KEYLESS = "keyless"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A parsed bundle. Nothing is verified yet.

    ``certificates`` are DER, the signer's first, and ``stamps`` are time stamps of the signature.
    """

    raw: bytes
    method: Method
    envelope: Envelope
    certificates: tuple[bytes, ...] = ()
    stamps: tuple[bytes, ...] = ()

    @classmethod
    def parse(cls, raw: bytes) -> Bundle:
        """Parse a bundle.

        Raises FormatError: it is malformed, larger than MAX_BUNDLE, or has more than one kind of
        verification material, of which readers would use different ones.
        """
        document = read_object(read_json(raw, "the signature bundle", MAX_BUNDLE), "the bundle")
        media_type = document.get("mediaType")
        if media_type not in _MEDIA_TYPES:
            raise FormatError(f"unsupported signature bundle {media_type!r:.100}")
        if "dsseEnvelope" not in document or "messageSignature" in document:
            raise FormatError("a signature bundle must have a DSSE envelope, and nothing else")
        envelope = Envelope.parse(document["dsseEnvelope"])
        material = read_object(document.get("verificationMaterial"), "verificationMaterial")
        method, certificates = _parse_material(material)
        return cls(raw, method, envelope, certificates, _parse_stamps(material))


def _parse_material(material: Mapping[str, Any]) -> tuple[Method, tuple[bytes, ...]]:
    kinds = {"publicKey", "x509CertificateChain", "certificate"} & material.keys()
    if len(kinds) != 1:
        raise FormatError("a signature bundle must have one key, certificate or chain")
    (kind,) = kinds
    value = read_object(material[kind], kind)
    if kind == "publicKey":
        # The hint, and the key itself in older bundles, are what the signer states: not read.
        return Method.KEY, ()
    if kind == "certificate":
        entries = material.get("tlogEntries")
        if not isinstance(entries, list) or len(entries) != 1:
            raise FormatError("a keyless signature must have exactly one entry of a log")
        return Method.KEYLESS, (read_base64(value.get("rawBytes"), "rawBytes"),)
    chain = value.get("certificates")
    if not isinstance(chain, list) or not 1 <= len(chain) <= _MAX_CERTIFICATES:
        raise FormatError(f"a certificate chain must have 1 to {_MAX_CERTIFICATES} certificates")
    return Method.CERTIFICATE, tuple(
        read_base64(read_object(entry, "a certificate").get("rawBytes"), "rawBytes")
        for entry in chain
    )


def _parse_stamps(material: Mapping[str, Any]) -> tuple[bytes, ...]:
    value = material.get("timestampVerificationData")
    data = {} if value is None else read_object(value, "timestampVerificationData")
    entries = data.get("rfc3161Timestamps", [])
    if not isinstance(entries, list) or len(entries) > MAX_STAMPS:
        raise FormatError(f"a signature bundle must have at most {MAX_STAMPS} time stamps")
    return tuple(
        read_base64(read_object(entry, "a time stamp").get("signedTimestamp"), "signedTimestamp")
        for entry in entries
    )


def build_key_bundle(envelope: Envelope, hint: str) -> bytes:
    """Return the bundle of a signature by a key; ``hint`` lets readers find it."""
    return _build(envelope, {"publicKey": {"hint": hint}})


def build_certificate_bundle(
    envelope: Envelope, certificates: tuple[bytes, ...], stamps: tuple[bytes, ...] = ()
) -> bytes:
    """Return the bundle of a signature with a certificate chain, the signer's first."""
    chain = [{"rawBytes": encode_base64(certificate)} for certificate in certificates]
    material: dict[str, Any] = {"x509CertificateChain": {"certificates": chain}}
    if stamps:
        entries = [{"signedTimestamp": encode_base64(stamp)} for stamp in stamps]
        material["timestampVerificationData"] = {"rfc3161Timestamps": entries}
    return _build(envelope, material)


def _build(envelope: Envelope, material: dict[str, Any]) -> bytes:
    return encode(
        {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": material | {"tlogEntries": []},
            "dsseEnvelope": envelope.to_json(),
        }
    )

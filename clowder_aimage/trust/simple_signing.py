"""cosign's signatures before version 3: a payload in a layer, under a tag of the subject.

Source: sigstore/cosign, specs/SIGNATURE_SPEC.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci import Descriptor, Digest, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.trust.certificate import encode_pem, parse_certificates
from clowder_aimage.trust.dsse import encode_base64, read_base64, read_object

MEDIA_TYPE = mediatype.SIMPLE_SIGNING
SIGNATURE = "dev.cosignproject.cosign/signature"
# The certificates of the key in PEM, its own first, and a time stamp of the signature in JSON
_CERTIFICATE, _CHAIN = "dev.sigstore.cosign/certificate", "dev.sigstore.cosign/chain"
_STAMP, _STAMP_FIELD = "dev.sigstore.cosign/rfc3161timestamp", "SignedRFC3161Timestamp"
_TYPE = "cosign container image signature"
# The specification's example has the second spelling, cosign writes the first.
_DIGEST_KEYS = ("docker-manifest-digest", "Docker-manifest-digest")
# Bytes of a payload.
MAX_PAYLOAD = 1 << 20


def build_signature_tag(subject: Digest) -> str:
    """Return the tag of the signatures of ``subject``."""
    return f"{subject.algorithm}-{subject.encoded}.sig"


def build_payload(subject: Digest, name: str) -> bytes:
    """Return the payload that is signed for a manifest; readers ignore ``name``."""
    return encode(
        {
            "critical": {
                "identity": {"docker-reference": name},
                "image": {_DIGEST_KEYS[0]: str(subject)},
                "type": _TYPE,
            },
            "optional": None,
        }
    )


@dataclass(frozen=True, slots=True)
class TaggedSignature:
    """The signature of a payload, as the annotations of its layer. Nothing is verified yet.

    ``certificates`` are DER, the signer's first, or none; ``stamps`` are time stamps.
    """

    signature: bytes
    certificates: tuple[bytes, ...] = ()
    stamps: tuple[bytes, ...] = ()

    @classmethod
    def parse(cls, layer: Descriptor) -> TaggedSignature:
        """Return the signature of a layer. Raises FormatError: it has none, or is malformed."""
        annotations = layer.annotations
        signature = read_base64(annotations.get(SIGNATURE), f"the annotation {SIGNATURE}")
        texts = [annotations[key] for key in (_CERTIFICATE, _CHAIN) if annotations.get(key)]
        try:
            certificates = [
                certificate
                for text in texts
                for certificate in parse_certificates(text.encode(), "the annotation")
            ]
        except UsageError as error:
            raise FormatError(error.message) from None
        if not annotations.get(_STAMP):
            return cls(signature, tuple(certificates))
        value = read_object(read_json(annotations[_STAMP].encode(), _STAMP, MAX_PAYLOAD), _STAMP)
        stamp = read_base64(value.get(_STAMP_FIELD), _STAMP_FIELD)
        return cls(signature, tuple(certificates), (stamp,))

    def build_layer(self, payload: bytes) -> Descriptor:
        """Return the layer of a payload with this signature."""
        annotations = {SIGNATURE: encode_base64(self.signature)}
        if self.certificates:
            leaf, *chain = map(encode_pem, self.certificates)
            annotations |= {_CERTIFICATE: leaf} | ({_CHAIN: "".join(chain)} if chain else {})
        for stamp in self.stamps:
            annotations[_STAMP] = encode({_STAMP_FIELD: encode_base64(stamp)}).decode()
        return Descriptor.of(MEDIA_TYPE, payload, annotations=annotations)


def parse_payload(payload: bytes) -> Digest:
    """Return the digest of the manifest that a payload names. Raises FormatError."""
    document = read_object(read_json(payload, "the signed payload", MAX_PAYLOAD), "the payload")
    critical = read_object(document.get("critical"), "critical")
    image = read_object(critical.get("image"), "critical.image")
    if critical.get("type") != _TYPE:
        raise FormatError("the signed payload is not a signature of an image by cosign")
    stated = [image[key] for key in _DIGEST_KEYS if key in image]
    if len(stated) != 1:
        raise FormatError("the signed payload must have one digest of a manifest")
    return Digest.parse(stated[0])

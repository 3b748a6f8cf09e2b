"""cosign's signatures before version 3: a payload in a layer, under a tag of the subject.

Source: sigstore/cosign, specs/SIGNATURE_SPEC.md.
"""

from __future__ import annotations

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Digest, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.trust.dsse import encode_base64, read_base64, read_object

MEDIA_TYPE = mediatype.SIMPLE_SIGNING
SIGNATURE = "dev.cosignproject.cosign/signature"
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


def build_layer(payload: bytes, signature: bytes) -> Descriptor:
    """Return the layer of a payload with its signature."""
    return Descriptor.of(MEDIA_TYPE, payload, annotations={SIGNATURE: encode_base64(signature)})


def read_signature(layer: Descriptor) -> bytes:
    """Return the signature of a layer. Raises FormatError: it has none."""
    return read_base64(layer.annotations.get(SIGNATURE), f"the annotation {SIGNATURE}")


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

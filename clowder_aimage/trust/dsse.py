"""DSSE envelopes (secure-systems-lab/dsse, protocol.md and envelope.md, 1.0)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.errors import FormatError

IN_TOTO = "application/vnd.in-toto+json"


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload of some type, and its only signature."""

    payload_type: str
    payload: bytes
    signature: bytes

    @classmethod
    def parse(cls, value: object) -> Envelope:
        """Parse the JSON value of an envelope.

        Raises FormatError: it is malformed, or has not exactly one signature. Of several, readers
        would verify different ones.
        """
        document = read_object(value, "the DSSE envelope")
        payload_type = document.get("payloadType")
        if not isinstance(payload_type, str) or not payload_type:
            raise FormatError("the DSSE envelope has no payloadType")
        signatures = document.get("signatures")
        if not isinstance(signatures, list) or len(signatures) != 1:
            raise FormatError("a DSSE envelope must have exactly one signature")
        # The keyid is a hint that anybody can write: it is not read.
        signature = read_base64(read_object(signatures[0], "a signature").get("sig"), "sig")
        if not signature:
            raise FormatError("the DSSE envelope has an empty signature")
        return cls(payload_type, read_base64(document.get("payload"), "payload"), signature)

    @property
    def signed(self) -> bytes:
        """The bytes that are signed."""
        return encode_pae(self.payload_type, self.payload)

    def to_json(self) -> dict[str, Any]:
        """Return the envelope as a JSON value."""
        return {
            "payload": encode_base64(self.payload),
            "payloadType": self.payload_type,
            "signatures": [{"sig": encode_base64(self.signature)}],
        }


def encode_pae(payload_type: str, payload: bytes) -> bytes:
    """Return the pre-authentication encoding: both parts with their lengths in bytes."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def read_base64(value: object, label: str) -> bytes:
    """Decode the base64 text of a field. Raises FormatError."""
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise FormatError(f"{label} is not base64")


def encode_base64(data: bytes) -> str:
    """Return data as base64 text."""
    return base64.b64encode(data).decode()


def read_object(value: object, label: str) -> Mapping[str, Any]:
    """Return a JSON object. Raises FormatError."""
    if not isinstance(value, dict):
        raise FormatError(f"{label} is not a JSON object")
    return value

"""The signer that a manifest of C2PA names, read without C2PA's library, and not checked.

The last signature in a manifest store is that of the active manifest. Its certificates are in DER,
the signer's first (RFC 5280, 4.1): version, serial number, algorithm, issuer, validity, subject.
"""

from __future__ import annotations

import re

_SIGNATURE = b"c2pa.signature\0"
# A certificate, its first part, and version 3: SEQUENCE, SEQUENCE, [0] INTEGER
_CERTIFICATE = re.compile(rb"\x30\x82..(\x30(?:\x82..|\x81.))\xa0\x03\x02\x01\x02", re.DOTALL)
# Object identifiers 2.5.4.3 and 2.5.4.10: common name and organisation
_NAMES = (b"\x06\x03\x55\x04\x03", b"\x06\x03\x55\x04\x0a")
_SUBJECT = 5
_MAX_NAME = 200
_UTF16 = 0x1E


def find_signer(manifest: bytes) -> str:
    """Return the common name in the signer's certificate, else its organisation; empty without."""
    found = _CERTIFICATE.search(manifest, manifest.rfind(_SIGNATURE) + 1)
    if found is None:
        return ""
    subject = b""
    position = found.end()
    for _ in range(_SUBJECT):
        subject, position = _read_value(manifest, position)
    for name in _NAMES:
        at = subject.find(name)
        if at >= 0:
            return _decode_text(subject, at + len(name))
    return ""


def _read_value(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the content of a value in DER, and the position after it (X.690, 8.1)."""
    length, start = int.from_bytes(data[at + 1 : at + 2], "big"), at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[at + 2 : start], "big")
    return data[start : start + length], start + length


def _decode_text(data: bytes, at: int) -> str:
    text, _ = _read_value(data, at)
    encoding = "utf-16-be" if data[at : at + 1] == bytes([_UTF16]) else "utf-8"
    return text.decode(encoding, "replace")[:_MAX_NAME]

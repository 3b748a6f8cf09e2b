"""Keys and certificates of tests, and picture files that are signed with them."""

from __future__ import annotations

import functools
import io
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from c2pa import Context, Reader
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from clowder_aimage.model.picture import encode_picture
from clowder_aimage.model.picture_mark import GENERATED, PictureMark
from clowder_aimage.pictures.file_parts import read_parts
from clowder_aimage.pictures.provenance.signer import PictureSigner
from clowder_aimage.pictures.provenance.signing_settings import SigningSettings

PIXELS = np.arange(16 * 32 * 3, dtype=np.uint8).reshape(16, 32, 3)
MARK = PictureMark(GENERATED)
FACTS: dict[str, Any] = {
    "reference": "localhost:5000/team/shapes:v1",
    "digest": f"sha256:{'ab' * 32}",
    "prompt": "two red circles",
    "negative": None,
    "seed": 2**64 - 1,
    "steps": 8,
    "guidance": 1.5,
    "loras": [{"model": "styles/ink", "strength": 0.8, "digest": f"sha256:{'cd' * 32}"}],
    "dtype": "float32",
    "backend": "mlx cpu",
}
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Authority:
    """A root certificate and its key."""

    certificate: x509.Certificate
    key: Any

    @classmethod
    def make(cls, name: str = "Test root") -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = build_certificate(name, key.public_key(), _name(name))
        builder = builder.add_extension(x509.BasicConstraints(True, None), True)
        usage = key_usage(key_cert_sign=True, crl_sign=True)
        return cls(builder.add_extension(usage, True).sign(key, hashes.SHA256()), key)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(_PEM).decode()

    def issue(
        self, directory: Path, key: Any = None, name: str = "Test pictures"
    ) -> SigningSettings:
        """Write a key and a chain, and return the settings of a signer."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        builder = build_certificate(name, key.public_key(), self.certificate.subject)
        builder = builder.add_extension(x509.BasicConstraints(False, None), True)
        builder = builder.add_extension(key_usage(digital_signature=True), True)
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(purposes, True).add_extension(authority, False)
        leaf = builder.sign(self.key, hashes.SHA256())
        chain, file = directory / "chain.pem", directory / "signer.key"
        chain.write_bytes(leaf.public_bytes(_PEM) + self.certificate.public_bytes(_PEM))
        write_key(file, key)
        return SigningSettings(str(chain), str(file))


def write_key(file: Path, key: Any, password: bytes | None = None) -> None:
    form = serialization.PrivateFormat.PKCS8
    protection = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    file.write_bytes(key.private_bytes(_PEM, form, protection))


def _name(name: str) -> x509.Name:
    parts = {NameOID.ORGANIZATION_NAME: "Tests", NameOID.COMMON_NAME: name}
    return x509.Name([x509.NameAttribute(kind, text) for kind, text in parts.items()])


def build_certificate(name: str, public: Any, issuer: x509.Name) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=_name(name),
        public_key=public,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(days=1),
        not_valid_after=now + timedelta(days=30),
    )


def key_usage(**used: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**dict.fromkeys(names, False) | used)


@functools.cache
def authority() -> Authority:
    """Return the authority of most tests."""
    return Authority.make()


def open_signer(directory: Path, **changed: Any) -> PictureSigner:
    settings = authority().issue(directory)
    fields = {"chain": settings.chain, "key": settings.key} | changed
    return PictureSigner.open(SigningSettings(**fields), lambda _: None)


def make_file(kind: str = "png", facts: Mapping[str, Any] | None = FACTS) -> bytes:
    return encode_picture(PIXELS, facts, kind, mark=MARK)


def read_own(data: bytes, kind: str, roots: str = "") -> dict[str, Any]:
    """Return the report of C2PA's own reader about a file."""
    settings = {
        "verify": {"remote_manifest_fetch": False, "verify_trust": bool(roots)},
        "trust": {"trust_anchors": roots} if roots else {},
    }
    with (
        Context.from_dict(settings) as context,
        Reader(f"image/{kind}", io.BytesIO(data), context=context) as reader,
    ):
        found: dict[str, Any] = json.loads(reader.json())
    return found


def get_active(found: Mapping[str, Any]) -> dict[str, Any]:
    active: dict[str, Any] = found["manifests"][found["active_manifest"]]
    return active


def get_assertion(manifest: Mapping[str, Any], label: str) -> Any:
    return next(one["data"] for one in manifest["assertions"] if one["label"] == label)


def split_png(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the names and contents of the chunks of a PNG file."""
    chunks, at = list[tuple[bytes, bytes]](), 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    return chunks


def join_png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def with_stores(data: bytes, *stores: bytes) -> bytes:
    """Return a PNG file with other manifest stores."""
    head, *chunks = [chunk for chunk in split_png(data) if chunk[0] != b"caBX"]
    return join_png([head, *((b"caBX", store) for store in stores), *chunks])


def get_store(data: bytes) -> bytes:
    return read_parts(data, "it").metadata.manifest

"""Keys of signers: ECDSA on the curves of NIST, in PEM files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clowder_aimage.errors import UsageError, needs
from clowder_aimage.trust.dsse import encode_base64

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

# Bytes of a file with a key or certificates.
MAX_FILE = 1 << 20
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_EXTRA = "trust"
_SUBJECT = "a signature"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key, as the bytes of its SubjectPublicKeyInfo in DER."""

    der: bytes

    @classmethod
    def parse(cls, data: bytes, name: str) -> PublicKey:
        """Parse a key in PEM; ``name`` is that of its file. Raises UsageError."""
        with needs(_SUBJECT, _EXTRA):
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.serialization import load_pem_public_key
        try:
            return cls.of(load_pem_public_key(data), name)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UsageError(f"{name} is not a public key in PEM: {error}") from None

    @classmethod
    def of(cls, key: object, name: str) -> PublicKey:
        """Return a key of cryptography. Raises UsageError: it is of another kind."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
            raise UsageError(
                f"the key in {name} is not supported",
                hint="use an ECDSA key on the curve P-256, P-384 or P-521",
            )
        return cls(
            key.public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    @property
    def pem(self) -> bytes:
        """The key in PEM, as OpenSSL writes it."""
        text = encode_base64(self.der)
        lines = [text[start : start + 64] for start in range(0, len(text), 64)]
        return "\n".join(
            ["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""]
        ).encode()

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the DER, as hex."""
        return hashlib.sha256(self.der).hexdigest()

    @property
    def pem_hint(self) -> str:
        """The hint of OpenSSF Model Signing: the hash of the PEM in hex."""
        return hashlib.sha256(self.pem).hexdigest()

    @property
    def der_hint(self) -> str:
        """The hint of cosign: the hash of the DER in base64."""
        return encode_base64(hashlib.sha256(self.der).digest())

    def verifies(self, signature: bytes, message: bytes, hash_name: str = "") -> bool:
        """Return True if ``signature`` is of ``message``, by the hash of the curve or another."""
        return verifies(self._load(), signature, message, hash_name)

    def _load(self) -> EllipticCurvePublicKey:
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
        from cryptography.hazmat.primitives.serialization import load_der_public_key

        key = load_der_public_key(self.der)
        assert isinstance(key, EllipticCurvePublicKey)  # noqa: S101 - as it was parsed
        return key


def verifies(
    key: EllipticCurvePublicKey, signature: bytes, message: bytes, hash_name: str = ""
) -> bool:
    """Return True if ``signature`` is of ``message``, by the hash of the curve or another."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    try:
        key.verify(signature, message, ECDSA(_select_hash(key.curve.key_size, hash_name)))
    except InvalidSignature:
        return False
    return True


def sign(key: EllipticCurvePrivateKey, message: bytes, hash_name: str = "") -> bytes:
    """Return the signature of ``message`` in DER, by the hash of the curve or another."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    return key.sign(message, ECDSA(_select_hash(key.curve.key_size, hash_name)))


def _select_hash(key_size: int, name: str) -> HashAlgorithm:
    """Return the hash of a curve (sigstore, algorithm registry), or the one of that name."""
    from cryptography.hazmat.primitives import hashes

    if name == "sha256" or key_size == 256:
        return hashes.SHA256()
    return hashes.SHA384() if key_size == 384 else hashes.SHA512()


def load_private_key(data: bytes, password: bytes | None, name: str) -> EllipticCurvePrivateKey:
    """Parse a private key in PEM. Raises UsageError, which does not contain it."""
    with needs(_SUBJECT, _EXTRA):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    if b"ENCRYPTED SIGSTORE PRIVATE KEY" in data or b"ENCRYPTED COSIGN PRIVATE KEY" in data:
        raise UsageError(
            f"{name} has cosign's own form of encrypted keys, which is not supported",
            hint="use a key in PKCS #8, which 'cosign import-key-pair' reads too, or a key command",
        )
    try:
        key = load_pem_private_key(data, password)
    except TypeError:
        # The key is encrypted and there is no password, or the reverse.
        if password is not None:
            return load_private_key(data, None, name)
        raise UsageError(
            f"the key in {name} is encrypted", hint="set AIMAGE_KEY_PASSWORD to its password"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(
            f"{name} is not a private key in PEM, or its password is wrong",
            hint="it is the public part of a key" if b"PUBLIC KEY" in data else None,
        ) from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UsageError(
            f"the key in {name} is not supported",
            hint="use an ECDSA key on the curve P-256, P-384 or P-521",
        )
    PublicKey.of(key.public_key(), name)
    return key

"""The keys of a fleet: who may publish what makes a worker act.

A fleet has one root key. Its public half reaches workers by their configuration, never over NATS.
It signs a key set: the public keys of the gateways and operators of the fleet. The key set is in a
bucket of NATS, so that keys are added and removed without the workers' configuration. All keys are
Ed25519 in the text form of NATS (nkeys, "NATS NKEYS"): a seed is "SO..." or "SU...", a public key
"O..." (root) or "U..." (gateways and operators).
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import nkeys  # type: ignore[import-untyped]
from nacl.exceptions import BadSignatureError, CryptoError
from nacl.public import SealedBox
from nacl.signing import SigningKey, VerifyKey
from pydantic import ConfigDict, Field, TypeAdapter

from clowder_aimage.errors import FormatError, UsageError, VerificationError
from clowder_aimage.fleet.field import STRICT, Id, read_fields

ROOT, SIGNER = nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_USER
# Bytes of a key set at most: some thousand keys.
MAX_KEY_SET = 512 << 10
# Begins what a root key signs, so that no signature has two meanings.
_DOMAIN = b"clowder fleet key set 1\n"
_LABEL = "the key set of the fleet"
_Role = Literal["gateway", "operator"]
_PublicKey = Annotated[str, Field(pattern=r"^U[A-Z2-7]{55}$")]
_Signature = Annotated[str, Field(max_length=128)]
_STRICT = ConfigDict(extra="forbid", strict=True)


class FleetKey:
    """A private key: that of the root of a fleet, of a gateway, or of an operator."""

    def __init__(self, raw: bytes, kind: int) -> None:
        self._raw, self._kind = raw, kind
        self._key = SigningKey(raw)
        self.public = encode_public_key(bytes(self._key.verify_key), kind)

    @classmethod
    def generate(cls, kind: int) -> FleetKey:
        """Return a new key of the kind ROOT or SIGNER."""
        return cls(secrets.token_bytes(32), kind)

    @classmethod
    def parse(cls, seed: bytes, kind: int) -> FleetKey:
        """Return the key of a seed in the text form. Raises UsageError for another kind."""
        try:
            prefix, raw = nkeys.decode_seed(seed.strip())
        except (ValueError, TypeError, IndexError, nkeys.NkeysError):
            prefix, raw = 0, b""
        key = cls(bytes(raw), kind) if prefix == kind and len(raw) == 32 else None
        if key is None or key.seed.encode() != seed.strip():
            expected = (
                "the root key of a fleet (SO...)" if kind == ROOT else "a signing key (SU...)"
            )
            raise UsageError(f"the text is not the seed of {expected}")
        return key

    @property
    def seed(self) -> str:
        """The private key in the text form."""
        return bytes(nkeys.encode_seed(self._raw, self._kind)).decode("ascii")

    def sign(self, data: bytes) -> bytes:
        """Return the signature of bytes, 64 bytes."""
        return bytes(self._key.sign(data).signature)

    def open(self, box: bytes) -> bytes | None:
        """Return the plaintext that was sealed for this key; None if the box is for another one."""
        try:
            return bytes(SealedBox(self._key.to_curve25519_private_key()).decrypt(box))
        except (CryptoError, ValueError, TypeError):
            return None


def seal(key: VerifyKey, data: bytes) -> bytes:
    """Return bytes that only the owner of a key can read (libsodium, "Sealed boxes")."""
    return bytes(SealedBox(key.to_curve25519_public_key()).encrypt(data))


def encode_public_key(raw: bytes, kind: int) -> str:
    """Return a public key of 32 bytes in the text form."""
    body = bytes([kind]) + raw
    checksum = nkeys.crc16(bytearray(body)).to_bytes(2, "little")
    return base64.b32encode(body + checksum).decode("ascii").rstrip("=")


def decode_public_key(text: str, kind: int) -> VerifyKey:
    """Return the public key in the text form. Raises FormatError for another kind."""
    try:
        body = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        body = b""
    if len(body) != 35 or encode_public_key(body[1:33], kind) != text:
        raise FormatError(f"{text[:80]!r} is not a public key ({'O' if kind == ROOT else 'U'}...)")
    return VerifyKey(body[1:33])


def is_signed(key: VerifyKey, data: bytes, signature: bytes) -> bool:
    """Return True if a signature of bytes was made by a key."""
    try:
        key.verify(data, signature)
    except (BadSignatureError, ValueError, TypeError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class SignerKey:
    """A gateway or an operator of a fleet, and its public key."""

    __pydantic_config__ = _STRICT

    name: Id
    role: _Role
    public: _PublicKey


@dataclass(frozen=True, slots=True)
class KeySet:
    """The gateways and operators of a fleet. A later key set has a greater ``version``."""

    __pydantic_config__ = _STRICT

    fleet: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
    version: Annotated[int, Field(ge=1, lt=1 << 53)]
    keys: tuple[SignerKey, ...]

    def find(self, public: str, role: str) -> VerifyKey | None:
        """Return a key of the set with that role; None if it is not in the set."""
        for key in self.keys:
            if key.public == public and key.role == role:
                return decode_public_key(key.public, SIGNER)
        return None

    def list_keys(self, role: str) -> list[VerifyKey]:
        """Return the keys with a role."""
        return [decode_public_key(key.public, SIGNER) for key in self.keys if key.role == role]

    def encode(self, root: FleetKey) -> bytes:
        """Return the key set as JSON, signed by the root key."""
        text = json.dumps(asdict(self), separators=(",", ":"))
        signature = base64.b64encode(root.sign(_DOMAIN + text.encode())).decode("ascii")
        return json.dumps({"keySet": text, "signature": signature}).encode()

    @classmethod
    def decode(cls, raw: bytes, root: str, fleet: str) -> KeySet:
        """Return the key set in JSON of a fleet with the public root key ``root``.

        Raises:
            VerificationError: It is not signed by that key, or is the key set of another fleet.
            FormatError: It is not a key set.
        """
        envelope = read_fields(_ENVELOPE, raw, _LABEL, MAX_KEY_SET)
        text = envelope.keySet.encode("utf-8", "surrogatepass")
        try:
            signature = base64.b64decode(envelope.signature, validate=True)
        except binascii.Error:
            signature = b""
        if not is_signed(decode_public_key(root, ROOT), _DOMAIN + text, signature):
            raise VerificationError(f"the key set of the fleet is not signed by {root}")
        key_set = read_fields(_KEY_SET, text, _LABEL, MAX_KEY_SET)
        if key_set.fleet != fleet:
            raise VerificationError(f"the key set is that of the fleet {key_set.fleet!r}")
        return key_set


@dataclass(frozen=True, slots=True)
class _Envelope:
    __pydantic_config__ = STRICT

    keySet: str  # noqa: N815
    signature: _Signature


_ENVELOPE, _KEY_SET = TypeAdapter(_Envelope), TypeAdapter(KeySet)

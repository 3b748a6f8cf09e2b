"""Signers: a private key in a file, or a command that reaches a key elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from clowder_aimage.errors import UsageError
from clowder_aimage.trust import key as keys
from clowder_aimage.trust.command import Command
from clowder_aimage.trust.dsse import read_base64
from clowder_aimage.trust.key import PublicKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Bytes of a signature or of the text of one
_MAX_OUTPUT = 4096
# The first byte of an ECDSA signature in DER: a SEQUENCE.
_SEQUENCE = 0x30


RequestStamp = Callable[[bytes], bytes]


class Signer(ABC):
    """A key that signs; ``certificates`` are those of its chain in DER, the key's first.

    ``request_stamp`` returns the time stamp of a signature: it counts after a certificate's end.
    """

    def __init__(
        self,
        public_key: PublicKey,
        certificates: tuple[bytes, ...] = (),
        request_stamp: RequestStamp | None = None,
    ) -> None:
        self.public_key, self.certificates = public_key, certificates
        self._request_stamp = request_stamp

    def stamp(self, signature: bytes) -> tuple[bytes, ...]:
        """Return the time stamps of a signature; there may be none. Raises AImageError."""
        return () if self._request_stamp is None else (self._request_stamp(signature),)

    def sign(self, message: bytes, hash_name: str = "") -> bytes:
        """Return the signature of a message in DER, verified. Raises AImageError."""
        signature = self._sign(message, hash_name)
        if not self.public_key.verifies(signature, message, hash_name):
            raise UsageError(
                "the signature does not verify with the public key",
                hint="name the public key of the key that signs",
            )
        return signature

    @abstractmethod
    def _sign(self, message: bytes, hash_name: str) -> bytes:
        """Return the signature of a message in DER."""


class KeySigner(Signer):
    """A private key in memory."""

    def __init__(
        self,
        key: EllipticCurvePrivateKey,
        name: str,
        certificates: tuple[bytes, ...] = (),
        request_stamp: RequestStamp | None = None,
    ) -> None:
        super().__init__(PublicKey.of(key.public_key(), name), certificates, request_stamp)
        self._key = key

    def _sign(self, message: bytes, hash_name: str) -> bytes:
        return keys.sign(self._key, message, hash_name)


class CommandSigner(Signer):
    """A command that reads a message on stdin and writes its signature, in DER or base64.

    It hashes the message by the curve of the key, as ``openssl dgst -sha256 -sign`` does.
    """

    def __init__(
        self,
        command: str,
        public_key: PublicKey,
        certificates: tuple[bytes, ...] = (),
        request_stamp: RequestStamp | None = None,
    ) -> None:
        super().__init__(public_key, certificates, request_stamp)
        self._command = Command(command, "signed", _MAX_OUTPUT)

    def _sign(self, message: bytes, hash_name: str) -> bytes:  # noqa: ARG002 - the command's own
        signature = self._command.run(message)
        if signature[0] == _SEQUENCE:
            return signature
        text = signature.decode(errors="replace").strip()
        return read_base64(text, f"the output of {self._command.name}")

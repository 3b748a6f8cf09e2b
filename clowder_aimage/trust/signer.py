"""Signers: a private key in a file, or a command that reaches a key elsewhere."""

from __future__ import annotations

import shlex
import subprocess
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from clowder_aimage.errors import UnauthorizedError, UsageError
from clowder_aimage.trust import key as keys
from clowder_aimage.trust.dsse import read_base64
from clowder_aimage.trust.key import PublicKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Seconds: a person may have to touch a token.
_TIMEOUT = 120.0
# Bytes of a signature or of the text of one
_MAX_OUTPUT = 4096
# The first byte of an ECDSA signature in DER: a SEQUENCE.
_SEQUENCE = 0x30


class Signer(ABC):
    """A key that signs; ``certificates`` are those of its chain in DER, the key's first."""

    def __init__(self, public_key: PublicKey, certificates: tuple[bytes, ...] = ()) -> None:
        self.public_key, self.certificates = public_key, certificates

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
        self, key: EllipticCurvePrivateKey, name: str, certificates: tuple[bytes, ...] = ()
    ) -> None:
        super().__init__(PublicKey.of(key.public_key(), name), certificates)
        self._key = key

    def _sign(self, message: bytes, hash_name: str) -> bytes:
        return keys.sign(self._key, message, hash_name)


class CommandSigner(Signer):
    """A command that reads a message on stdin and writes its signature, in DER or base64.

    It hashes the message by the curve of the key, as ``openssl dgst -sha256 -sign`` does.
    """

    def __init__(self, command: str, public_key: PublicKey) -> None:
        super().__init__(public_key)
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"invalid command {command!r}: {error}") from None
        if not self._words:
            raise UsageError("the command that signs is empty")

    def _sign(self, message: bytes, hash_name: str) -> bytes:  # noqa: ARG002 - the command's own
        name = self._words[0]
        try:
            done = subprocess.run(
                self._words, input=message, capture_output=True, timeout=_TIMEOUT, check=False
            )
        except FileNotFoundError:
            raise UsageError(f"the command {name} that signs is not installed") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnauthorizedError(f"the command {name} has not signed: {error}") from None
        if done.returncode or not done.stdout or len(done.stdout) > _MAX_OUTPUT:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise UnauthorizedError(
                f"the command {name} has not signed: exit code {done.returncode}"
                + (f", {said}" if said else "")
            )
        if done.stdout[0] == _SEQUENCE:
            return done.stdout
        return read_base64(done.stdout.decode(errors="replace").strip(), f"the output of {name}")

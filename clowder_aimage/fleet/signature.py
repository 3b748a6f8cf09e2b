"""Signed messages: what makes a worker act is from a gateway or an operator of its fleet.

The API of JetStream sends its responses, and stored messages, to any subject that a client names,
past the client's permissions. So a worker believes no message for its subject alone. A signature is
over the fleet, the subject, the headers of this program and the digest of the data. It is verified
before anything in the message is decoded.

A request or an order is accepted once, within VALID seconds of its signature. A job may be
delivered again, and is bound to the time at which NATS stored it. All times are those of the NATS
server (``clock``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clowder_aimage.errors import VerificationError
from clowder_aimage.fleet.key import FleetKey, KeySet, is_signed

# Seconds after its signature that a message is accepted.
VALID = 60.0
# Seconds that the clocks of two programs may differ.
SKEW = 30.0
SIGNER, SIGNED_AT, NONCE = "Aimage-Signer", "Aimage-Signed-At", "Aimage-Nonce"
_SIGNATURE = "Aimage-Signature"
# The other headers are those of NATS; the program reads none of them before it has verified.
_COVERED = ("Aimage-", "Nats-Msg-Id")
_DOMAIN = "clowder fleet message 1"


@dataclass(frozen=True, slots=True)
class SignedMessage:
    """A message as it was published: its subject, headers and data."""

    subject: str
    headers: Mapping[str, str]
    data: bytes

    def build_signed_text(self, fleet: str) -> bytes:
        """Return the bytes that are signed."""
        covered = sorted(
            (name, text)
            for name, text in self.headers.items()
            if name.startswith(_COVERED) and name != _SIGNATURE
        )
        digest = hashlib.sha256(self.data).hexdigest()
        return json.dumps([_DOMAIN, fleet, self.subject, covered, digest]).encode()


class MessageSigner:
    """Signs the messages of a gateway or an operator. ``clock`` is the time of the NATS server."""

    def __init__(self, fleet: str, key: FleetKey, clock: Callable[[], float] = time.time) -> None:
        self._fleet, self._key, self._clock = fleet, key, clock

    def sign(self, subject: str, data: bytes, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a message with its signature."""
        signed = {
            **headers,
            SIGNER: self._key.public,
            SIGNED_AT: f"{self._clock():.3f}",
            NONCE: secrets.token_hex(16),
        }
        text = SignedMessage(subject, signed, data).build_signed_text(self._fleet)
        return {**signed, _SIGNATURE: base64.b64encode(self._key.sign(text)).decode("ascii")}


class MessageVerifier:
    """Verifies messages for a worker. Without a key set none is accepted.

    ``clock`` is the time of the NATS server.
    """

    def __init__(self, fleet: str, clock: Callable[[], float] = time.time) -> None:
        self._fleet, self._clock = fleet, clock
        self.key_set: KeySet | None = None
        # The nonces of accepted messages, and the time at which each is too old to be repeated.
        self._accepted: OrderedDict[str, float] = OrderedDict()

    def check_once(self, message: SignedMessage, role: str) -> None:
        """Accept a request or an order of a role, once. Raises VerificationError."""
        timestamp = self._clock()
        age = timestamp - self._verify(message, role)
        if not -SKEW <= age <= VALID + SKEW:
            raise VerificationError(
                f"it was signed {abs(age):.0f} seconds {'ago' if age > 0 else 'from now'}, and is "
                f"valid for {VALID:.0f}; the clocks of the machines may differ"
            )
        while self._accepted and next(iter(self._accepted.values())) < timestamp:
            self._accepted.popitem(last=False)
        nonce = message.headers[NONCE]
        if nonce in self._accepted:
            raise VerificationError("it is a repetition")
        self._accepted[nonce] = timestamp + VALID + 2 * SKEW

    def check_stored(self, message: SignedMessage, role: str) -> None:
        """Accept a message of any age that a role has signed. Raises VerificationError."""
        self._verify(message, role)

    def check_job(self, message: SignedMessage, role: str, stored_at: float) -> float:
        """Return the time of the signature of a job that NATS stored at a time.

        Raises VerificationError.
        """
        signed_at = self._verify(message, role)
        if not -SKEW <= stored_at - signed_at <= VALID + SKEW:
            raise VerificationError(
                f"it was signed {abs(stored_at - signed_at):.0f} seconds before or after it was "
                f"stored; the clocks of the gateway and of NATS may differ"
            )
        return signed_at

    def _verify(self, message: SignedMessage, role: str) -> float:
        """Return the time of the signature. Raises VerificationError."""
        if self.key_set is None:
            raise VerificationError("there is no key set of the fleet yet")
        headers = message.headers
        signer, text = headers.get(SIGNER, ""), headers.get(_SIGNATURE, "")
        if not text:
            raise VerificationError("it is not signed")
        key = self.key_set.find(signer, role)
        if key is None:
            raise VerificationError(f"its signer {signer[:56]!r} is not a {role} of the fleet")
        try:
            signature = base64.b64decode(text, validate=True)
            signed_at, nonce = float(headers[SIGNED_AT]), headers[NONCE]
        except (binascii.Error, LookupError, ValueError):
            signature, signed_at, nonce = b"", 0.0, ""
        if not nonce or not is_signed(key, message.build_signed_text(self._fleet), signature):
            raise VerificationError(f"its signature is not that of {signer[:56]}")
        return signed_at

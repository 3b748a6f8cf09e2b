"""Tickets: a worker can write only for jobs that it was given.

Each job has a secret, its ticket, which is in its message on the queue. The frames of a response
carry a MAC by the ticket. So a gateway takes no frame from another worker, whatever subject the
server has stored it in. The ticket of a job with an idempotency key is stored for other gateways of
the fleet, in a form that only they can read (``Admission``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nacl.signing import VerifyKey

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import Frame
from clowder_aimage.fleet.key import FleetKey, seal

_BYTES = 32


@dataclass(frozen=True, slots=True)
class JobTicket:
    """The right to write the frames of ``job``."""

    job: str
    secret: bytes

    @classmethod
    def generate(cls, job: str) -> JobTicket:
        """Return a new ticket of a job."""
        return cls(job, secrets.token_bytes(_BYTES))

    @classmethod
    def parse(cls, job: str, text: str) -> JobTicket:
        """Return the ticket of a job in a header. Raises FormatError."""
        return cls(job, _decode(text, _BYTES))

    def encode(self) -> str:
        """Return the text of the header."""
        return base64.b64encode(self.secret).decode("ascii")

    def prove(self, frame: Frame) -> Frame:
        """Return a frame with its MAC."""
        return replace(frame, proof=self._compute_mac(frame))

    def has_proven(self, frame: Frame) -> bool:
        """Return True if a frame was written by a worker that was given the job."""
        proof = frame.proof.encode("utf-8", "replace")
        return hmac.compare_digest(self._compute_mac(frame).encode(), proof)

    def _compute_mac(self, frame: Frame) -> str:
        past = ",".join(frame.past)
        place = f"{frame.worker} {frame.attempt} {frame.number} {frame.kind} {past}"
        text = f"{self.job} {place}\n".encode() + frame.data
        return hmac.new(self.secret, text, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Admission:
    """The data of an ADMITTED mark: the digest of the request, and the sealed ticket."""

    request: str
    boxes: tuple[bytes, ...]

    @classmethod
    def build(cls, request: str, ticket: JobTicket, gateways: Iterable[VerifyKey]) -> Admission:
        """Return the admission of a job, whose ticket the gateways with those keys can read."""
        return cls(request, tuple(seal(key, ticket.secret) for key in gateways))

    def encode(self) -> bytes:
        """Return the data of the mark."""
        boxes = (base64.b64encode(box).decode("ascii") for box in self.boxes)
        return " ".join((self.request, *boxes)).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> Admission:
        """Return the admission in the data of a mark. Raises FormatError."""
        request, *boxes = data.decode("ascii", "replace").split(" ")
        return cls(request, tuple(map(_decode, boxes)))

    def open(self, job: str, key: FleetKey) -> JobTicket | None:
        """Return the ticket; None if it was not sealed for this key."""
        for box in self.boxes:
            secret = key.open(box)
            if secret is not None and len(secret) == _BYTES:
                return JobTicket(job, secret)
        return None


def _decode(text: str, size: int | None = None) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or (size is not None and len(data) != size):
        raise FormatError("the ticket of a job is invalid")
    return data

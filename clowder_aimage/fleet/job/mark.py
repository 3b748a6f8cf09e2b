"""The marks of a job: which attempt counts, and whether the job is over.

All marks of a job are in one stream, each in a subject that only its writer may publish to. Every
reader decides alike, from their order in the stream:

- An attempt begins with a BEGIN that is signed by the ticket of the job. The ticket is in the
  job's message, so only workers that were given the job can begin an attempt.
- Of several attempts that have begun, the last one counts. Other marks count only if they are of
  that attempt, in the subject of its worker.
- After a mark of LAST none counts.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import ADMITTED, BEGIN, ENDS, LAST, Frame
from clowder_aimage.fleet.key import SIGNER, FleetKey, decode_public_key, is_signed
from clowder_aimage.fleet.name import GATEWAYS

_DOMAIN = "clowder fleet attempt 1"


def _build_claim(job: str, frame: Frame) -> bytes:
    """Return the bytes that a ticket signs for an attempt."""
    begin = frame.data.decode("ascii", "replace")
    return json.dumps([_DOMAIN, job, frame.worker, frame.attempt, begin]).encode()


@dataclass(frozen=True, slots=True)
class JobTicket:
    """The right to begin attempts at a job."""

    key: FleetKey

    @classmethod
    def generate(cls) -> JobTicket:
        """Return a new ticket."""
        return cls(FleetKey.generate(SIGNER))

    @classmethod
    def parse(cls, text: str) -> JobTicket:
        """Return the ticket in a header. Raises UsageError."""
        return cls(FleetKey.parse(text.encode("utf-8", "replace"), SIGNER))

    @property
    def public(self) -> str:
        """The public key of the ticket."""
        return self.key.public

    def sign_begin(self, job: str, frame: Frame) -> str:
        """Return the proof of a BEGIN frame."""
        return base64.b64encode(self.key.sign(_build_claim(job, frame))).decode("ascii")


@dataclass(slots=True)
class MarkChain:
    """The marks of ``job`` that count. ``tickets`` are the public keys of its tickets.

    ``begin`` is that of the last attempt, which is running if ``is_running``. ``last`` is the last
    mark that counts.
    """

    job: str
    tickets: set[str] = field(default_factory=set)
    begin: Frame | None = None
    last: Frame | None = None
    is_running: bool = False

    @property
    def is_over(self) -> bool:
        """True if the job has ended."""
        return self.last is not None and self.last.kind in LAST

    def add_all(self, frames: Iterable[Frame]) -> MarkChain:
        """Take the marks of a job in the order of the stream; return this chain."""
        for frame in frames:
            self.add(frame)
        return self

    def add(self, frame: Frame) -> bool:
        """Take the next mark; return True if it counts."""
        if self.is_over or not self._counts(frame):
            return False
        if frame.kind == ADMITTED:
            self.tickets.add(read_admission(frame).ticket)
        elif frame.kind == BEGIN:
            self.begin = frame
        self.is_running, self.last = frame.kind == BEGIN, frame
        return True

    def _counts(self, frame: Frame) -> bool:
        if frame.kind == ADMITTED:
            with contextlib.suppress(FormatError):
                return frame.worker == GATEWAYS and bool(read_admission(frame))
            return False
        if frame.kind == BEGIN:
            return frame != self.begin and self._is_proven(frame)
        return (
            self.is_running
            and self.begin is not None
            and frame.is_of(self.begin)
            and frame.kind in ENDS
        )

    def _is_proven(self, frame: Frame) -> bool:
        try:
            proof = base64.b64decode(frame.proof, validate=True)
        except (binascii.Error, ValueError):
            return False
        claim = _build_claim(self.job, frame)
        return any(is_signed(decode_public_key(key, SIGNER), claim, proof) for key in self.tickets)


@dataclass(frozen=True, slots=True)
class Admission:
    """An ADMITTED mark: the digest of the request, and the public key of the job's ticket."""

    request: str
    ticket: str

    def encode(self) -> bytes:
        """Return the data of the mark."""
        return f"{self.request} {self.ticket}".encode("ascii")


def read_admission(frame: Frame) -> Admission:
    """Return the data of an ADMITTED mark. Raises FormatError."""
    request, _, ticket = frame.data.decode("ascii", "replace").partition(" ")
    decode_public_key(ticket, SIGNER)
    return Admission(request, ticket)

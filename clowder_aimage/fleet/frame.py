"""Frames: the parts of a response, as a worker stores them for gateways.

The frames of a job are in streams that keep them for a time: a gateway reads them as they are
published, and again from the streams if it missed some. Each attempt to serve a job numbers its
frames from 0. All frames but HEAD and DATA are marks, which have a separate stream
(``job/mark.py``). The subject of a frame has the name of its worker, which the permissions of NATS
fix, and it has a MAC (``proof``) by the ticket of its job (``ticket.py``).

BEGIN   an attempt begins; the data are random, and tell it from others with its number
HEAD    status and headers of the response, as JSON
DATA    bytes of the body
END     the response is complete; the last mark of a job
RELEASED the attempt ended without fault, such as at a shutdown, and another one follows
FAILED  the attempt failed, and another one may follow
DEAD    the job was given up; the data are the reason, as JSON. The last mark of a job
ADMITTED a gateway accepted the job of an idempotency key; the data are the digest of its request,
         and its ticket, sealed for the gateways
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.field import escape_text, is_id

BEGIN, HEAD, DATA, END = "begin", "head", "data", "end"
RELEASED, FAILED, DEAD, ADMITTED = "released", "failed", "dead", "admitted"
# No mark follows.
LAST = (END, DEAD)
# Marks that end an attempt.
ENDS = (*LAST, RELEASED, FAILED)
# The kinds of frames that may follow in an attempt.
FOLLOWING = {
    BEGIN: (HEAD, DEAD, RELEASED, FAILED),
    HEAD: (DATA, *ENDS),
    DATA: (DATA, *ENDS),
    RELEASED: (),
    FAILED: (),
}
_KINDS = {*FOLLOWING, END, DEAD, ADMITTED}
# Bytes of a frame at most; NATS allows 1 MiB for a message.
CHUNK = 256 * 1024
# Workers whose attempts at a job failed.
_MAX_PAST = 100
_NUMBERS = re.compile("([0-9]{1,9}) ([0-9]{1,9})")
_KIND, _PLACE, _PAST, _PROOF = "Aimage-Frame", "Aimage-Place", "Aimage-Past", "Aimage-Proof"


def parse_worker(subject: str) -> str:
    """Return the worker in the subject of a frame, or an empty text."""
    parts = subject.split(".")
    return parts[2] if len(parts) == 4 else ""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame: its kind, the attempt (from 1; 0 for a gateway's), and its number in the attempt.

    ``worker`` wrote it, after the attempts of the workers ``past`` had failed.
    """

    kind: str
    attempt: int
    number: int
    data: bytes = b""
    worker: str = ""
    past: tuple[str, ...] = ()
    proof: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the message."""
        fields = {_KIND: self.kind, _PLACE: f"{self.attempt} {self.number}"}
        optional = {_PAST: ",".join(self.past), _PROOF: self.proof}
        return fields | {name: text for name, text in optional.items() if text}

    def is_of(self, begin: Frame) -> bool:
        """Return True if this frame is of the attempt of a BEGIN."""
        return (self.worker, self.attempt) == (begin.worker, begin.attempt)

    @classmethod
    def parse(cls, subject: str, headers: Mapping[str, str] | None, data: bytes | None) -> Frame:
        """Return the frame in a message of a subject. Raises FormatError."""
        fields = headers or {}
        kind, worker = fields.get(_KIND, ""), parse_worker(subject)
        numbers = _NUMBERS.fullmatch(fields.get(_PLACE, ""))
        past = tuple(filter(None, fields.get(_PAST, "").split(",")))
        is_valid = kind in _KINDS and all(map(is_id, (worker, *past)))
        if numbers is None or not is_valid or len(past) > _MAX_PAST:
            raise FormatError(
                f"it has a frame that cannot be read, of the kind {escape_text(kind)!r}"
            )
        attempt, number = int(numbers[1]), int(numbers[2])
        return cls(kind, attempt, number, data or b"", worker, past, fields.get(_PROOF, ""))


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that a worker may begin: its number, and the workers whose attempts failed."""

    number: int
    past: tuple[str, ...]

    @classmethod
    def following(cls, mark: Frame | None) -> Attempt:
        """Return the attempt after the last ``mark`` of a job. The mark is not of a kind in LAST.

        An attempt without RELEASED counts as failed: its worker vanished.
        """
        if mark is None:
            return cls(1, ())
        is_fault = mark.kind not in (RELEASED, ADMITTED)
        return cls(mark.attempt + 1, (*mark.past, mark.worker) if is_fault else mark.past)

"""Frames: the parts of a response, as a worker stores them for gateways.

The frames of a job are the messages of one subject, in a stream that keeps them for a time: a
gateway reads them as they are published, and again from the stream if it missed some. Each attempt
to serve a job numbers its frames from 0. All frames but HEAD and DATA are marks: they are stored in
a second subject first, each only after the mark that its writer knows as the last one. So the marks
of a job are a chain: of two simultaneous attempts only one begins, an attempt ends only if none
began after it, and nothing follows the last mark. The other frames of a superseded attempt are
ignored, at any position in the stream.

BEGIN   an attempt begins; the data are random, and tell it from others with its number
HEAD    status and headers of the response, as JSON
DATA    bytes of the body
END     the response is complete; the last mark of a job
RELEASED the attempt ended without fault, such as at a shutdown, and another one follows
FAILED  the attempt failed, and another one may follow
DEAD    the job was given up; the data are the reason, as JSON. The last mark of a job
ADMITTED a gateway accepted the job of an idempotency key; the data are the digest of its request
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.field import escape_text, is_id

BEGIN, HEAD, DATA, END = "begin", "head", "data", "end"
RELEASED, FAILED, DEAD, ADMITTED = "released", "failed", "dead", "admitted"
_ENDS = (RELEASED, FAILED, DEAD)
# The kinds of frames that may follow in an attempt.
FOLLOWING = {
    BEGIN: (HEAD, *_ENDS),
    HEAD: (DATA, END, *_ENDS),
    DATA: (DATA, END, *_ENDS),
    RELEASED: (),
    FAILED: (),
}
_KINDS = {*FOLLOWING, END, DEAD, ADMITTED}
# No mark follows.
LAST = (END, DEAD)
# Bytes of a frame at most; NATS allows 1 MiB for a message.
CHUNK = 256 * 1024
# Workers whose attempts at a job failed.
_MAX_PAST = 100
_NUMBERS = re.compile("([0-9]{1,9}) ([0-9]{1,9})")
_KIND, _PLACE, _WORKER, _PAST = "Aimage-Frame", "Aimage-Place", "Aimage-Worker", "Aimage-Past"


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

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the message."""
        fields = {_KIND: self.kind, _PLACE: f"{self.attempt} {self.number}", _WORKER: self.worker}
        return {**fields, _PAST: ",".join(self.past)} if self.past else fields

    @classmethod
    def parse(cls, headers: Mapping[str, str] | None, data: bytes | None) -> Frame:
        """Return the frame in a message. Raises FormatError."""
        fields = headers or {}
        kind, worker = fields.get(_KIND, ""), fields.get(_WORKER, "")
        numbers = _NUMBERS.fullmatch(fields.get(_PLACE, ""))
        past = tuple(filter(None, fields.get(_PAST, "").split(",")))
        is_valid = kind in _KINDS and all(map(is_id, filter(None, (worker, *past))))
        if numbers is None or not is_valid or len(past) > _MAX_PAST:
            raise FormatError(
                f"it has a frame that cannot be read, of the kind {escape_text(kind)!r}"
            )
        return cls(kind, int(numbers[1]), int(numbers[2]), data or b"", worker, past)


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

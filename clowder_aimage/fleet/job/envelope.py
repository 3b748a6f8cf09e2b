"""A job as a message of the queue: signed by a gateway, with a large body in a stream of its own.

The message has the id of the job, its ticket, and the digest of its encoded form, so that all of it
is verified before it is decoded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import FormatError, VerificationError
from clowder_aimage.fleet.field import is_id
from clowder_aimage.fleet.frame import CHUNK
from clowder_aimage.fleet.job.job import MAX_JOB, FleetJob
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import GATEWAY
from clowder_aimage.fleet.signature import SignedMessage
from clowder_aimage.fleet.ticket import JobTicket

JOB, TICKET, BODY = "Aimage-Job", "Aimage-Ticket", "Aimage-Body"
# Bytes of a job that is one message.
INLINE = 2 * CHUNK


@dataclass(frozen=True, slots=True)
class StoredBody:
    """An encoded job that is stored in chunks: its digest, its bytes, and the id of the upload."""

    digest: str
    size: int
    upload: str

    @classmethod
    def of(cls, payload: bytes, upload: str) -> StoredBody:
        """Return the description of an encoded job."""
        return cls(hashlib.sha256(payload).hexdigest(), len(payload), upload)

    def encode(self) -> str:
        """Return the text of the header."""
        return f"{self.digest} {self.size} {self.upload}"

    @classmethod
    def parse(cls, text: str) -> StoredBody:
        """Return the description in a header. Raises FormatError."""
        match = re.fullmatch(r"([0-9a-f]{64}) (\d{1,10}) ([0-9a-f]{32})", text, re.ASCII)
        if match is None or int(match[2]) > MAX_JOB:
            raise FormatError("the description of the body of a job is invalid")
        return cls(match[1], int(match[2]), match[3])

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.size // CHUNK)


@dataclass(frozen=True, slots=True)
class JobEnvelope:
    """A verified message of the queue: the id of its job, the ticket, and the encoded job.

    ``signed_at`` is in seconds of the epoch, by the clock of the NATS server.
    """

    id: str
    ticket: JobTicket
    data: bytes
    body: StoredBody | None
    signed_at: float

    @classmethod
    def verify(cls, link: FleetLink, message: Msg) -> JobEnvelope:
        """Return a job that a gateway has signed. Raises VerificationError, FormatError."""
        headers: Mapping[str, str] = message.headers or {}
        signed = SignedMessage(message.subject, headers, message.data)
        stored_at = message.metadata.timestamp.timestamp()
        signed_at = link.verifier.check_job(signed, GATEWAY, stored_at)
        job = headers.get(JOB, "")
        if not is_id(job):
            raise FormatError("the id of a job is invalid")
        body = StoredBody.parse(headers[BODY]) if BODY in headers else None
        ticket = JobTicket.parse(job, headers.get(TICKET, ""))
        return cls(job, ticket, message.data, body, signed_at)

    async def read(self, link: FleetLink) -> FleetJob:
        """Return the job. Raises FormatError, VerificationError, and the exceptions of LOST."""
        if self.body is None:
            job = FleetJob.decode(self.data)
        else:
            chunks = await self._read_chunks(link, self.body)
            job = await run_io(_decode_chunks, chunks, self.body)
        if job.id != self.id:
            raise VerificationError("the id of the job is not that of its message")
        return job

    async def _read_chunks(self, link: FleetLink, body: StoredBody) -> list[bytes]:
        chunks = []
        for number in range(body.chunks):
            subject = link.names.build_body_subject(body.upload, number)
            try:
                message = await link.streams.get_msg(
                    link.names.bodies, subject=subject, direct=True
                )
            except NotFoundError:
                raise FormatError("the body of the job has expired") from None
            chunks.append(message.data or b"")
        return chunks


def _decode_chunks(chunks: list[bytes], body: StoredBody) -> FleetJob:
    data = b"".join(chunks)
    if hashlib.sha256(data).hexdigest() != body.digest:
        raise VerificationError("the body of the job does not have its digest")
    return FleetJob.decode(data)

"""The frames of one attempt, written by a worker."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import tenacity
from nats.js import api

from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.frame import BEGIN, CHUNK, DATA, END, HEAD, Attempt, Frame
from clowder_aimage.fleet.job.mark import MarkChain
from clowder_aimage.fleet.link import LOST, MESSAGE_ID, FleetLink
from clowder_aimage.fleet.ticket import JobTicket

# Seconds for the acknowledgement of a frame before it is published again.
ACKNOWLEDGED = 5.0
# Seconds before a message is published again that was not stored.
FULL = 1.0
# Seconds before a stream is read again from a replica that is behind.
BEHIND = 0.05
_LOOKS = 100


class SupersededError(AImageError):
    """Another attempt at the job has begun: this one does not count."""


class JobLog:
    """Writes the frames of an attempt at the job of a ticket in order.

    A frame that is not stored yet is published again: a full store, or a server that is away,
    delays the end of a job and loses nothing.
    """

    def __init__(self, link: FleetLink, worker: str, attempt: Attempt, ticket: JobTicket) -> None:
        self.attempt = attempt
        self._link, self._worker, self._ticket = link, worker, ticket
        self._subject = link.names.build_log_subject(worker, ticket.job)
        self._marks = link.names.build_mark_subject(worker, ticket.job)
        # It tells the attempt from others with its number.
        self._id = secrets.token_hex(8)
        # The number of the BEGIN in the stream of marks.
        self._begun = 0
        self._chain = MarkChain(ticket)
        self._number = 0
        self._sent: list[tuple[Frame, asyncio.Future[api.PubAck]]] = []

    async def begin(self) -> None:
        """Write that the attempt begins. From now on it is the one that counts."""
        frame = self._build_frame(BEGIN, self._id.encode())
        self._begun = await self._store(self._marks, frame)
        self._chain.add(frame)

    async def write_head(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        """Write the status and the headers of the response."""
        await self._send(
            self._build_frame(HEAD, _encode_json({"status": status, "headers": headers}))
        )

    async def write_data(self, data: bytes) -> None:
        """Write bytes of the body."""
        for start in range(0, len(data), CHUNK):
            await self._send(self._build_frame(DATA, data[start : start + CHUNK]))

    async def end(self, kind: str = END, facts: Mapping[str, Any] | None = None) -> None:
        """Write the last frame of the attempt, once all others are stored.

        Raises SupersededError: another attempt has begun, and this one does not count.
        """
        await self._settle()
        frame = self._build_frame(kind, _encode_json(facts) if facts is not None else b"")
        number = await self._store(self._marks, frame)
        for position, mark in await self._read_until(number):
            is_counted = self._chain.add(mark)
            if position == number and is_counted:
                return
        raise SupersededError("another attempt at the job has begun")

    def _build_frame(self, kind: str, data: bytes = b"") -> Frame:
        number, self._number = self._number, self._number + 1
        attempt = self.attempt
        return self._ticket.prove(
            Frame(kind, attempt.number, number, data, self._worker, attempt.past)
        )

    async def _send(self, frame: Frame) -> None:
        self._sent.append((frame, await self._link.store_later(self._subject, frame)))
        while self._sent and self._sent[0][1].done() and not self._sent[0][1].exception():
            del self._sent[0]

    async def _settle(self) -> None:
        for frame, future in self._sent:
            try:
                async with asyncio.timeout(ACKNOWLEDGED):
                    await future
            except LOST:
                await self._store(self._subject, frame)
        self._sent.clear()

    async def _store(self, subject: str, frame: Frame) -> int:
        """Store a frame, which is one frame in the stream if it is published again."""
        headers = {**frame.headers, MESSAGE_ID: f"{self._id} {frame.number}"}
        return await _retry()(self._link.store, subject, frame.data, headers)

    async def _read_until(self, number: int) -> list[tuple[int, Frame]]:
        """Return the marks after the BEGIN up to a number, which a replica may get later."""
        for _ in range(_LOOKS):
            marks: list[tuple[int, Frame]] = await _retry()(
                self._link.read_marks, self._ticket.job, self._begun
            )
            if any(position >= number for position, _ in marks):
                return marks
            await asyncio.sleep(BEHIND)
        # The stream was made anew.
        return []


def _retry() -> tenacity.AsyncRetrying:
    is_lost = tenacity.retry_if_exception_type((AImageError, *LOST))
    return tenacity.AsyncRetrying(retry=is_lost, wait=tenacity.wait_fixed(FULL))


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

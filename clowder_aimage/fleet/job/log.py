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
from clowder_aimage.fleet.link import LOST, FleetLink, LastFrameError

# Seconds for the acknowledgement of a frame before it is published again.
ACKNOWLEDGED = 5.0
# Seconds before a message is published again that was not stored.
FULL = 1.0


class JobLog:
    """Writes frames in order. A mark is published as a frame once it is stored (``job_frame``).

    A frame that is not stored yet is published again: a full store, or a server that is away,
    delays the end of a job and loses nothing.
    """

    def __init__(self, link: FleetLink, job: str, worker: str, attempt: Attempt) -> None:
        self.attempt = attempt
        self._link, self._worker = link, worker
        self._subject, self._marks = (
            link.names.build_log_subject(job),
            link.names.build_mark_subject(job),
        )
        self._number, self._after = 0, 0
        self._sent: list[tuple[Frame, asyncio.Future[api.PubAck]]] = []

    async def begin(self, after: int) -> None:
        """Write that the attempt begins, after the mark with that number in the stream.

        Raises LastFrameError: another attempt has begun.
        """
        self._after = after
        self._after = await self._mark(self._build_frame(BEGIN, secrets.token_hex(8).encode()))

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

        Raises LastFrameError: another attempt has begun and this one does not count, or it is over.
        """
        await self._settle()
        await self._mark(self._build_frame(kind, _encode_json(facts) if facts is not None else b""))

    async def _mark(self, frame: Frame) -> int:
        """Store a mark, and publish it; return its number. It may be stored without an answer."""
        try:
            number = await self._store(self._marks, frame, after=self._after)
        except LastFrameError:
            stored, number = await self._read_last()
            if stored != frame:
                raise
        await self._link.publish(self._subject, frame.data, frame.headers)
        return number

    def _build_frame(self, kind: str, data: bytes = b"") -> Frame:
        number, self._number = self._number, self._number + 1
        return Frame(kind, self.attempt.number, number, data, self._worker, self.attempt.past)

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

    async def _store(self, subject: str, frame: Frame, after: int | None = None) -> int:
        is_refused = tenacity.retry_if_not_exception_type(LastFrameError)
        retryer = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(AImageError) & is_refused,
            wait=tenacity.wait_fixed(FULL),
        )
        return await retryer(self._link.store, subject, frame.data, frame.headers, after=after)

    async def _read_last(self) -> tuple[Frame | None, int]:
        retryer = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(LOST), wait=tenacity.wait_fixed(FULL)
        )
        return await retryer(self._link.read_last, self._marks)


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

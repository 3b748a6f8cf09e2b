"""The frames of one attempt, written by a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nats.js import api

from clowder_aimage.errors import NetworkError
from clowder_aimage.fleet.fleet_link import (
    LOST,
    MESSAGE_ID,
    FleetLink,
    FullStoreError,
    LastFrameError,
)
from clowder_aimage.fleet.job_frame import BEGIN, DATA, END, HEAD, PIECE, Attempt, Frame

ACKNOWLEDGED = 5.0  # seconds for the acknowledgement of a frame before it is published again
FULL = 1.0  # seconds before a message is published again that a full store refused


class JobLog:
    """Writes frames in order. The first and the last are published only if no other attempt began.

    A frame that is not stored yet is published again: a full store, or a server that is away,
    delays the end of a job and loses nothing.
    """

    def __init__(self, link: FleetLink, job: str, worker: str, attempt: Attempt) -> None:
        self.attempt = attempt
        self._link, self._worker = link, worker
        self._subject = link.names.log(job)
        self._number, self._after = 0, 0
        self._sent: list[tuple[Frame, asyncio.Future[api.PubAck]]] = []

    async def begin(self, after: int) -> None:
        """Write that the attempt begins, after the frame with that number in the stream.

        Raises LastFrameError: another attempt has begun.
        """
        self._after = await self._store(self._frame(BEGIN), after=after)

    async def head(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        """Write the status and the headers of the response."""
        await self._send(self._frame(HEAD, _json({"status": status, "headers": headers})))

    async def data(self, data: bytes) -> None:
        """Write bytes of the body."""
        for start in range(0, len(data), PIECE):
            await self._send(self._frame(DATA, data[start : start + PIECE]))

    async def end(self, kind: str = END, facts: Mapping[str, Any] | None = None) -> None:
        """Write the last frame of the attempt, once all others are stored.

        Raises LastFrameError: another attempt has begun, and this one does not count.
        """
        await self._settle()
        frame = self._frame(kind, _json(facts) if facts is not None else b"")
        while True:
            try:
                self._after = await self._store(frame, after=self._after)
                return
            except LastFrameError:
                last, self._after = await self._last()
                if last is None or last.attempt > self.attempt.number:
                    raise

    def _frame(self, kind: str, data: bytes = b"") -> Frame:
        number, self._number = self._number, self._number + 1
        return Frame(kind, self.attempt.number, number, data, self._worker, self.attempt.past)

    async def _send(self, frame: Frame) -> None:
        self._sent.append((frame, await self._link.store_later(self._subject, frame)))
        while len(self._sent) > 1 and self._sent[0][1].done() and not self._sent[0][1].exception():
            self._after = max(self._after, self._sent.pop(0)[1].result().seq)

    async def _settle(self) -> None:
        for frame, future in self._sent:
            try:
                async with asyncio.timeout(ACKNOWLEDGED):
                    number = (await future).seq
            except LOST:
                number = await self._store(frame)
            self._after = max(self._after, number)
        self._sent.clear()

    async def _store(self, frame: Frame, after: int | None = None) -> int:
        headers = frame.headers()
        if after is not None:  # so that a repetition is recognised, and not refused
            headers[MESSAGE_ID] = f"{self._subject} {frame.attempt} {frame.number} {self._worker}"
        while True:
            try:
                return await self._link.store(self._subject, frame.data, headers, after=after)
            except (FullStoreError, NetworkError):
                await asyncio.sleep(FULL)

    async def _last(self) -> tuple[Frame | None, int]:
        while True:
            try:
                return await self._link.last(self._subject)
            except LOST:
                await asyncio.sleep(FULL)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

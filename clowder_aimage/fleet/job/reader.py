"""The frames of a job in order: as they are published, and from the stream if some were missed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from nats.aio.msg import Msg

from clowder_aimage.fleet.frame import BEGIN, LAST, Frame
from clowder_aimage.fleet.link import LOST, FleetLink

# Seconds without a frame after which the stream is read.
SILENCE = 2.0


class FrameOrder:
    """Puts frames into order: of the newest attempt, each once, by number.

    A later attempt begins with its first frame; frames of earlier ones are dropped then. An attempt
    with the same number is another one if its BEGIN is: the marks before it have expired.
    """

    def __init__(self) -> None:
        self._attempt, self._next = 0, 0
        self._begin_data = b""
        self._early: dict[int, Frame] = {}

    @property
    def has_gap(self) -> bool:
        """Return True if a frame is missing before one that has arrived."""
        return bool(self._early)

    def add(self, frame: Frame) -> list[Frame]:
        """Take a frame, and return those whose turn has come."""
        is_begin = frame.kind == BEGIN
        is_other = is_begin and self._next > 0 and frame.data != self._begin_data
        if frame.attempt > self._attempt or (is_other and frame.attempt == self._attempt):
            self._attempt, self._next = frame.attempt, 0
            self._early.clear()
        if frame.attempt < self._attempt or frame.number < self._next or frame.attempt == 0:
            return []
        self._begin_data = frame.data if is_begin else self._begin_data
        self._early[frame.number] = frame
        ready = []
        while (next_frame := self._early.pop(self._next, None)) is not None:
            ready.append(next_frame)
            self._next += 1
        return ready


class JobReader:
    """Reads the frames of one job."""

    def __init__(self, link: FleetLink, job: str) -> None:
        self._link, self._subject = link, link.names.build_log_subject(job)
        # the number in the stream of the last frame that was read from it, by subject
        self._read_to = {link.names.build_mark_subject(job): 0, self._subject: 0}
        self._live: asyncio.Queue[Frame] = asyncio.Queue()
        self._order = FrameOrder()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[JobReader]:
        """Listen for frames. Raises NatsError if there is no connection."""
        async with self._link.listening(self._subject, self._take):
            yield self

    async def _take(self, message: Msg) -> None:
        frame = Frame.parse(message.headers, message.data)
        if frame is not None:
            self._live.put_nowait(frame)

    async def iter_frames(self, *, from_start: bool = False) -> AsyncGenerator[Frame, None]:
        """Yield the frames until the last one; ``from_start`` those that are stored first.

        While there is no connection it waits. Raises ApiError (503): the fleet cannot be used.
        """
        must_read = from_start
        while True:
            batch = await self._read() if must_read else await self._listen()
            for frame in batch:
                yield frame
                if frame.kind in LAST:
                    return
            must_read = not must_read and (not batch or self._order.has_gap)

    async def _listen(self) -> list[Frame]:
        try:
            async with asyncio.timeout(SILENCE):
                return self._order.add(await self._live.get())
        except TimeoutError:
            self._link.check_lasting()
            return []

    async def _read(self) -> list[Frame]:
        frames: list[Frame] = []
        with contextlib.suppress(*LOST):
            for subject, after in self._read_to.items():
                async for number, message in self._link.read_messages(subject, after):
                    self._read_to[subject] = number
                    frame = Frame.parse(message.headers, message.data)
                    if frame is not None:
                        frames += self._order.add(frame)
        return frames

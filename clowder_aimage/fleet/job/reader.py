"""The frames of a job in order: as they are published, and from the stream if some were missed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from nats.aio.msg import Msg

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import BEGIN, DATA, FOLLOWING, HEAD, LAST, Frame, parse_worker
from clowder_aimage.fleet.job.mark import MarkChain, read_chain
from clowder_aimage.fleet.link import LOST, FleetLink
from clowder_aimage.fleet.ticket import JobTicket

# Seconds without a frame after which the stream is read.
SILENCE = 2.0
# Bytes that workers may send for a job, and what a frame counts besides its data.
MAX_RESPONSE = 512 << 20
_FRAME = 256
# Bytes of frames that wait in memory.
_MAX_LIVE = 64 << 20


class FrameOrder:
    """Puts frames into order: of the attempt that counts, each once, by number.

    ``chain`` takes the marks. An attempt begins with its first frame; frames of others are dropped.
    """

    def __init__(self, chain: MarkChain) -> None:
        self.chain = chain
        self._begin: Frame | None = None
        self._next = 0
        self._early: dict[int, Frame] = {}
        self._last_kind, self._size = "", 0

    @property
    def has_gap(self) -> bool:
        """Return True if a frame is missing before one that has arrived."""
        return bool(self._early)

    @property
    def lacks_frames(self) -> bool:
        """Return True if the last frame of a job has arrived, and one before it is missing."""
        return any(frame.kind in LAST for frame in self._early.values())

    @property
    def begin(self) -> Frame | None:
        """The BEGIN of the attempt whose frames are put into order."""
        return self._begin

    def add_mark(self, mark: Frame) -> list[Frame]:
        """Take a mark, and return the frames whose turn has come. Raises FormatError."""
        return self._put(mark) if self.chain.add(mark) else []

    def add(self, frame: Frame) -> list[Frame]:
        """Take a part of a response, and return the frames whose turn has come.

        Raises FormatError: they are too large, or a frame does not follow the one before it.
        """
        if frame.kind not in (HEAD, DATA):
            raise FormatError(f"it has the mark {frame.kind!r} among its parts")
        return self._put(frame)

    def follow(self, chain: MarkChain) -> list[Frame]:
        """Take the marks as they are in the stream, and return the frames whose turn has come."""
        self.chain = chain
        begin, last = chain.begin, chain.last
        ready = self._put(begin) if begin is not None and begin != self._begin else []
        return ready + (self._put(last) if last is not None else [])

    def _put(self, frame: Frame) -> list[Frame]:
        if frame.kind == BEGIN and frame != self._begin:
            self._begin, self._next = frame, 0
            self._early.clear()
        if self._begin is None or not frame.is_of(self._begin) or frame.number < self._next:
            return []
        self._size += _FRAME + len(frame.data)
        if self._size > MAX_RESPONSE:
            raise FormatError(f"it has more than {MAX_RESPONSE} bytes")
        self._early[frame.number] = frame
        ready = []
        while (next_frame := self._early.pop(self._next, None)) is not None:
            self._check_turn(next_frame)
            ready.append(next_frame)
            self._next += 1
        return ready

    def _check_turn(self, frame: Frame) -> None:
        allowed = FOLLOWING.get(self._last_kind, ()) if frame.number else (BEGIN,)
        if frame.kind not in allowed:
            place = f"after {self._last_kind!r}" if frame.number else "as the first one"
            raise FormatError(f"it has a frame {frame.kind!r} {place}")
        self._last_kind = frame.kind


class JobReader:
    """Reads the frames of one job.

    ``restore`` is called after a silence: the job may have been lost. Raises AImageError.
    """

    def __init__(
        self,
        link: FleetLink,
        job: str,
        restore: Callable[[MarkChain], Awaitable[None]],
    ) -> None:
        self._link, self._job, self._restore = link, job, restore
        self._live: asyncio.Queue[Msg] = asyncio.Queue()
        self._live_size = 0
        # The attempt whose frames were read from the stream, and the number of the last one.
        self._read_to: tuple[Frame | None, int] = None, 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[JobReader]:
        """Listen for frames. Raises NatsError if there is no connection."""
        names, listening = self._link.names, self._link.listening
        async with contextlib.AsyncExitStack() as stack:
            for build in names.build_mark_subject, names.build_log_subject:
                await stack.enter_async_context(listening(build("*", self._job), self._take))
            yield self

    async def _take(self, message: Msg) -> None:
        # What is dropped is read from the stream.
        if self._live_size < _MAX_LIVE:
            self._live_size += _FRAME + len(message.data)
            self._live.put_nowait(message)

    async def iter_frames(
        self, ticket: JobTicket, *, from_start: bool = False
    ) -> AsyncGenerator[Frame, None]:
        """Yield the frames until the last one; ``from_start`` those that are stored first.

        While there is no connection it waits.

        Raises:
            ApiError: The fleet cannot be used (503), or the job is lost again and again.
            FormatError: The frames are not valid, or end before the last one.
        """
        self._ticket, self._order = ticket, FrameOrder(MarkChain(ticket))
        must_read = from_start
        while True:
            batch, is_whole = await self._read() if must_read else (await self._listen(), False)
            for frame in batch:
                yield frame
                if frame.kind in LAST:
                    return
            if is_whole and not batch and self._order.lacks_frames:
                raise FormatError("it is not complete, and its job is over")
            must_read = not must_read and (not batch or self._order.has_gap)

    async def _listen(self) -> list[Frame]:
        try:
            async with asyncio.timeout(SILENCE):
                message = await self._live.get()
        except TimeoutError:
            self._link.check_lasting()
            return []
        self._live_size -= _FRAME + len(message.data)
        if not self._link.names.is_mark(message.subject):
            return self._add(message)
        try:
            mark = Frame.parse(message.subject, message.headers, message.data)
        except FormatError:
            # It does not count.
            return []
        return self._order.add_mark(mark)

    def _add(self, message: Msg | Any) -> list[Frame]:
        """Take a part of a response, unless it is that of an attempt that does not count.

        Raises FormatError.
        """
        begin = self._order.begin
        if begin is None or parse_worker(message.subject) != begin.worker:
            return []
        frame = Frame.parse(message.subject, message.headers, message.data)
        # Another worker may have it stored in the subject of this one.
        return self._order.add(frame) if self._ticket.has_proven(frame) else []

    async def _read(self) -> tuple[list[Frame], bool]:
        """Return the new frames in the streams, and True if these are all."""
        frames: list[Frame] = []
        try:
            chain = await read_chain(self._link, self._ticket)
            frames += self._order.follow(chain)
            if (begin := self._order.begin) is not None:
                frames += await self._read_log(begin)
        except LOST:
            return frames, False
        if not frames:
            await self._restore(chain)
        return frames, True

    async def _read_log(self, begin: Frame) -> list[Frame]:
        """Return the frames of an attempt whose turn has come. Raises NatsError, TimeoutError."""
        subject = self._link.names.build_log_subject(begin.worker, self._job)
        frames: list[Frame] = []
        after = self._read_to[1] if self._read_to[0] == begin else 0
        async for number, message in self._link.read_messages(subject, after):
            self._read_to = begin, number
            frames += self._add(message)
        return frames

"""The frames of a job in order: as they are published, and from the stream if some were missed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from nats.aio.msg import Msg

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import BEGIN, FOLLOWING, LAST, Frame
from clowder_aimage.fleet.link import LOST, FleetLink

# Seconds without a frame after which the stream is read.
SILENCE = 2.0
# Bytes that workers may send for a job, and what a frame counts besides its data.
MAX_RESPONSE = 512 << 20
_FRAME = 256
# Bytes of frames that wait in memory.
_MAX_LIVE = 64 << 20


class FrameOrder:
    """Puts frames into order: of the newest attempt, each once, by number.

    A later attempt begins with its first frame; frames of earlier ones are dropped then. An attempt
    with the same number is another one if its BEGIN is: the marks before it have expired.
    """

    def __init__(self) -> None:
        self._attempt, self._next = 0, 0
        self._begin_data = b""
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

    def add(self, frame: Frame) -> list[Frame]:
        """Take a frame, and return those whose turn has come.

        Raises FormatError: they are too large, or a frame does not follow the one before it.
        """
        is_begin = frame.kind == BEGIN
        is_other = is_begin and self._next > 0 and frame.data != self._begin_data
        if frame.attempt > self._attempt or (is_other and frame.attempt == self._attempt):
            self._attempt, self._next = frame.attempt, 0
            self._early.clear()
        if frame.attempt < self._attempt or frame.number < self._next or frame.attempt == 0:
            return []
        self._begin_data = frame.data if is_begin else self._begin_data
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
    """Reads the frames of one job."""

    def __init__(self, link: FleetLink, job: str) -> None:
        self._link, self._subject = link, link.names.build_log_subject(job)
        # the number in the stream of the last frame that was read from it, by subject
        self._read_to = {link.names.build_mark_subject(job): 0, self._subject: 0}
        self._live: asyncio.Queue[Msg] = asyncio.Queue()
        self._live_size = 0
        self._order = FrameOrder()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[JobReader]:
        """Listen for frames. Raises NatsError if there is no connection."""
        async with self._link.listening(self._subject, self._take):
            yield self

    async def _take(self, message: Msg) -> None:
        # What is dropped is read from the stream.
        if self._live_size < _MAX_LIVE:
            self._live_size += _FRAME + len(message.data)
            self._live.put_nowait(message)

    async def iter_frames(
        self, is_queued: Callable[[], Awaitable[bool]], *, from_start: bool = False
    ) -> AsyncGenerator[Frame, None]:
        """Yield the frames until the last one; ``from_start`` those that are stored first.

        While there is no connection it waits. ``is_queued`` returns True while the job is on the
        queue: after that only frames that are stored follow.

        Raises:
            ApiError: The fleet cannot be used (503).
            FormatError: The frames are not valid, or end before the last one.
        """
        must_read, is_over = from_start, False
        while True:
            batch, is_whole = await self._read() if must_read else (await self._listen(), False)
            for frame in batch:
                yield frame
                if frame.kind in LAST:
                    return
            is_silent = is_whole and not batch
            if is_silent and (is_over or self._order.lacks_frames):
                raise FormatError("it is not complete, and its job is over")
            is_over = is_silent and not await is_queued()
            must_read = is_over or (not must_read and (not batch or self._order.has_gap))

    async def _listen(self) -> list[Frame]:
        try:
            async with asyncio.timeout(SILENCE):
                message = await self._live.get()
        except TimeoutError:
            self._link.check_lasting()
            return []
        self._live_size -= _FRAME + len(message.data)
        return self._order.add(Frame.parse(message.headers, message.data))

    async def _read(self) -> tuple[list[Frame], bool]:
        """Return the new frames in the stream, and True if these are all."""
        frames: list[Frame] = []
        try:
            for subject, after in self._read_to.items():
                async for number, message in self._link.read_messages(subject, after):
                    self._read_to[subject] = number
                    frames += self._order.add(Frame.parse(message.headers, message.data))
        except LOST:
            return frames, False
        return frames, True

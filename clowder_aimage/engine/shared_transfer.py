"""One pull or push, watched by all who asked for it.

A transfer runs in a thread of its own. What it tells is noted there, and looked at from the event
loop every now and then: a copy has thousands of events a second, and nobody reads that many lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.content import Rate
from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.copy_event import CopyEvent, OnEvent
from clowder_aimage.engine.engine_error import StoppedError
from clowder_aimage.oci import Descriptor, Digest, Reference

EVERY = 0.1  # seconds between two looks at a transfer
PULL, PUSH = "pull", "push"
_WINDOW = 5.0  # seconds that a speed is measured over
Work = Callable[["SharedTransfer", OnEvent], Descriptor]


@dataclass(slots=True)
class TransferBlob:
    """How far a blob is. One that was there (``is_here``) did not move at all."""

    digest: Digest
    total: int
    completed: int = 0
    is_here: bool = False


class SharedTransfer:
    """A pull or a push that waits, is under way, or has ended. Whoever waits for it counts as a
    user; one that has no user and is not ``is_kept`` gives up, and what it has fetched stays."""

    def __init__(
        self, kind: str, reference: Reference, work: Work, is_over: Callable[[], bool]
    ) -> None:
        self.kind, self.reference = kind, reference
        self.is_kept = self.is_stopped = self.is_begun = False
        self.urgency = self.priority = self.number = 0
        self.users = 0
        self.total = 0
        self.sources: Counter[str] = Counter()  # bytes, by where they came from
        self.begun = self.moved = time.monotonic()
        self.is_stalled = False
        self.result: asyncio.Future[Descriptor] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(_look)
        self._work, self._is_over = work, is_over
        self._blobs: dict[Digest, TransferBlob] = {}
        self._passed: deque[tuple[float, int]] = deque(maxlen=64)
        self._count = 0
        self._lock = threading.Lock()

    @property
    def is_queued(self) -> bool:
        """Whether others keep it waiting: not only a moment, as they all begin with."""
        return not self.is_begun and time.monotonic() - self.begun > 1.0

    @property
    def completed(self) -> int:
        """The bytes that are here."""
        return sum(blob.completed for blob in self.blobs())

    @property
    def rate(self) -> float:
        """Bytes per second of late."""
        now = time.monotonic()
        with self._lock:
            late = [(at, count) for at, count in self._passed if now - at <= _WINDOW]
            if not late:
                return 0.0
            return (self._count - late[0][1]) / max(now - late[0][0], EVERY)

    def blobs(self) -> list[TransferBlob]:
        """All blobs that were spoken of, as they are now."""
        with self._lock:
            return [replace(blob) for blob in self._blobs.values()]

    def start(self) -> None:
        """Work in a thread that does not keep the process alive."""
        self.is_begun = True
        self.begun = self.moved = time.monotonic()
        loop = asyncio.get_running_loop()

        def settle(set_it: Callable[[Any], None], value: Any) -> None:
            def soon() -> None:
                if not self.result.done():
                    set_it(value)

            with contextlib.suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(soon)

        def run() -> None:
            try:
                root = self._work(self, self._hear)
            except BaseException as error:
                settle(self.result.set_exception, error)
            else:
                settle(self.result.set_result, root)

        threading.Thread(target=run, daemon=True, name=f"aimage-{self.kind}").start()

    def stop(self) -> None:
        """Give up; one that is at work does so between two pieces of a blob."""
        self.is_stopped = True
        if not self.is_begun and not self.result.done():
            self.result.set_exception(self._given_up())

    def end_now(self) -> None:
        """Give up without waiting for the thread, which may hang on a registry that is silent."""
        self.stop()
        if not self.result.done():
            self.result.set_exception(self._given_up())

    def go_on(self) -> None:
        """Raise StoppedError where this is to be given up; asked in whatever thread is at it."""
        if self.is_stopped or self._is_over() or not (self.users or self.is_kept):
            self.is_stopped = True
            raise self._given_up()

    def _given_up(self) -> StoppedError:
        return StoppedError(f"the {self.kind} of {self.reference} was given up")

    def came(self, source: str, count: int) -> None:
        """Bytes came from somewhere: "registry", "mirror", "neighbour"."""
        with self._lock:
            self.sources[source] += count

    def _hear(self, event: CopyEvent) -> None:
        """Note an event, in whatever thread it comes."""
        if self.kind == PUSH:  # a pull may stop only between bytes of a blob: see Gate
            self.go_on()
        with self._lock:
            self._note(event)

    def _note(self, event: CopyEvent) -> None:
        if event.kind == "plan":
            self.total = event.count
        if event.kind == "plan" or event.content is None:
            return
        content = event.content
        blob = self._blobs.setdefault(content.digest, TransferBlob(content.digest, content.size))
        if event.kind == "progress":
            blob.completed = max(0, min(blob.total, blob.completed + event.count))
            self._moved(event.count)
        elif event.kind == "skip":
            blob.completed, blob.is_here = blob.total, True
            self.sources["cache"] += blob.total
        elif event.kind == "done":
            blob.completed = blob.total

    def _moved(self, count: int) -> None:
        now = time.monotonic()
        if not self._passed or now - self._passed[-1][0] >= EVERY:
            self._passed.append((now, self._count))
        self._count += max(0, count)
        self.moved, self.is_stalled = now, False

    async def watch(self) -> AsyncGenerator[TransferBlob, None]:
        """Blobs whose state is another than was told, until the transfer ends.

        Raises:
            whatever ``pull`` or ``push`` raises; StoppedError: it was given up.
        """
        told: dict[Digest, int] = {}
        while True:
            is_done = self.result.done()  # before looking: what comes later is seen next time
            for blob in self.blobs():
                if told.get(blob.digest) != blob.completed:
                    told[blob.digest] = blob.completed
                    yield blob
            if is_done:
                break
            await asyncio.wait([self.result], timeout=EVERY)
        self.result.result()

    async def end(self) -> Descriptor:
        """What was moved. Raises as ``watch``."""
        return await asyncio.shield(self.result)


class TransferGate(Rate):
    """Bytes of a pull pass here, as fast as they come; none does once the pull is given up.

    Where bytes pass, what came is kept for the next pull, and nothing is left locked.
    """

    def __init__(self, transfer: SharedTransfer) -> None:
        super().__init__(1.0)
        self._transfer = transfer

    @property
    def burst(self) -> int:
        return CHUNK_SIZE

    def passed(self, _: int) -> None:
        self._transfer.go_on()


def _look(result: asyncio.Future[Descriptor]) -> None:
    """Have an error count as seen, although nobody may be left who waits for it."""
    result.exception()

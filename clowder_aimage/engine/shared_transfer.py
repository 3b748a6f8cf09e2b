"""One pull or push, shared by all requests for it.

A transfer runs in a thread of its own, which records its events; the event loop polls the record: a
copy has thousands of events a second.
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
from clowder_aimage.content.copy_option import CopyEvent, OnEvent
from clowder_aimage.engine.engine_error import StoppedError
from clowder_aimage.oci import Descriptor, Digest, Reference

INTERVAL = 0.1  # seconds between two polls of a transfer
PULL, PUSH = "pull", "push"
_WINDOW = 5.0  # seconds that a speed is measured over
Work = Callable[["SharedTransfer", OnEvent], Descriptor]


@dataclass(slots=True)
class TransferBlob:
    """The progress of a blob. With ``is_here`` it was in the store before the transfer."""

    digest: Digest
    total: int
    completed: int = 0
    is_here: bool = False


class SharedTransfer:
    """A pull or a push that waits, runs or has ended.

    ``users`` is the number of requests that wait for it. A transfer without users ends unless
    ``is_kept`` is set; partial content is kept.
    """

    def __init__(
        self, kind: str, reference: Reference, work: Work, is_over: Callable[[], bool]
    ) -> None:
        self.kind, self.reference = kind, reference
        self.is_kept = self.is_stopped = self.is_begun = False
        self.urgency = self.priority = self.number = 0
        self.users = 0
        self.total = 0
        self.sources: Counter[str] = Counter()  # bytes by source
        self.begun = self.moved = time.monotonic()
        self.is_stalled = False
        self.result: asyncio.Future[Descriptor] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(asyncio.Future.exception)  # retrieved, also without users
        self._work, self._is_over = work, is_over
        self._blobs: dict[Digest, TransferBlob] = {}
        self._passed: deque[tuple[float, int]] = deque(maxlen=64)
        self._count = 0
        self._lock = threading.Lock()

    @property
    def is_queued(self) -> bool:
        """True if it waits for others, longer than every transfer does at first."""
        return not self.is_begun and time.monotonic() - self.begun > 1.0

    @property
    def completed(self) -> int:
        """The bytes in the store."""
        return sum(blob.completed for blob in self.blobs())

    @property
    def rate(self) -> float:
        """Bytes per second, over the last seconds."""
        now = time.monotonic()
        with self._lock:
            recent = [(at, count) for at, count in self._passed if now - at <= _WINDOW]
            if not recent:
                return 0.0
            return (self._count - recent[0][1]) / max(now - recent[0][0], INTERVAL)

    def blobs(self) -> list[TransferBlob]:
        """Return all known blobs, as they are now."""
        with self._lock:
            return [replace(blob) for blob in self._blobs.values()]

    def start(self) -> None:
        """Run in a daemon thread."""
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
                root = self._work(self, self._on_event)
            except BaseException as error:
                settle(self.result.set_exception, error)
            else:
                settle(self.result.set_result, root)

        threading.Thread(target=run, daemon=True, name=f"aimage-{self.kind}").start()

    def stop(self) -> None:
        """End the transfer; a running one ends between two pieces of a blob."""
        self.is_stopped = True
        if not self.is_begun and not self.result.done():
            self.result.set_exception(self._stopped())

    def end_now(self) -> None:
        """End without waiting for the thread, which may hang on a silent registry."""
        self.stop()
        if not self.result.done():
            self.result.set_exception(self._stopped())

    def check(self) -> None:
        """Raise StoppedError if the transfer is to end; called in its thread."""
        if self.is_stopped or self._is_over() or not (self.users or self.is_kept):
            self.is_stopped = True
            raise self._stopped()

    def _stopped(self) -> StoppedError:
        return StoppedError(f"the {self.kind} of {self.reference} was given up")

    def count(self, source: str, count: int) -> None:
        """Count bytes from a source: "registry", "mirror", "neighbour"."""
        with self._lock:
            self.sources[source] += count

    def _on_event(self, event: CopyEvent) -> None:
        """Record an event, in any thread."""
        if self.kind == PUSH:  # a pull may end only between bytes of a blob: see TransferGate
            self.check()
        with self._lock:
            self._record(event)

    def _record(self, event: CopyEvent) -> None:
        if event.kind == "plan":
            self.total = event.count
        if event.kind == "plan" or event.content is None:
            return
        content = event.content
        blob = self._blobs.setdefault(content.digest, TransferBlob(content.digest, content.size))
        if event.kind == "progress":
            blob.completed = max(0, min(blob.total, blob.completed + event.count))
            self._advance(event.count)
        elif event.kind == "skip":
            blob.completed, blob.is_here = blob.total, True
            self.sources["cache"] += blob.total
        elif event.kind == "done":
            blob.completed = blob.total

    def _advance(self, count: int) -> None:
        now = time.monotonic()
        if not self._passed or now - self._passed[-1][0] >= INTERVAL:
            self._passed.append((now, self._count))
        self._count += max(0, count)
        self.moved, self.is_stalled = now, False

    async def watch(self) -> AsyncGenerator[TransferBlob, None]:
        """Yield each blob whose state has changed, until the transfer ends.

        Raises:
            StoppedError: it was stopped; and as ``pull`` or ``push``.
        """
        seen: dict[Digest, int] = {}
        while True:
            is_done = (
                self.result.done()
            )  # before the blobs are read: later changes are seen next time
            for blob in self.blobs():
                if seen.get(blob.digest) != blob.completed:
                    seen[blob.digest] = blob.completed
                    yield blob
            if is_done:
                break
            await asyncio.wait([self.result], timeout=INTERVAL)
        self.result.result()

    async def end(self) -> Descriptor:
        """Wait for the end and return the root. Raises as ``watch``."""
        return await asyncio.shield(self.result)


class TransferGate(Rate):
    """An unlimited rate that ends a stopped pull.

    Between two pieces of a blob, partial content is kept for the next pull, and no lock is held.
    """

    def __init__(self, transfer: SharedTransfer) -> None:
        super().__init__(1.0)
        self._transfer = transfer

    @property
    def burst(self) -> int:
        return CHUNK_SIZE

    def passed(self, _: int) -> None:
        self._transfer.check()

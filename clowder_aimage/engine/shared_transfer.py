"""A pull or push that is shared by all requests for it.

A transfer runs in its own thread and records its events. The event loop polls the record, as a
copy has thousands of events per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from clowder_aimage.content import Rate, Source, telemetry
from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.copy_option import CopyEvent, OnEvent
from clowder_aimage.content.store import Reader, WrappedSource
from clowder_aimage.content.verified_reader import SourceReader
from clowder_aimage.engine.admission import StoppedError
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.pipeline import COMPONENTS
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.registry import Repository

# Seconds between two polls of a transfer
INTERVAL = 0.1
PULL, PUSH = "pull", "push"
# Seconds over which the rate is measured
_WINDOW = 5.0
T = TypeVar("T")
Work = Callable[["SharedTransfer", OnEvent], Descriptor]


@dataclass(slots=True)
class TransferBlob:
    """The progress of a blob."""

    digest: Digest
    total: int
    completed: int = 0


class SharedTransfer:
    """A pull or push that is queued, running or done.

    ``users`` is the number of requests that wait for it. A transfer without users is stopped unless
    ``is_kept`` is set; partial content is kept. ``stored`` is the AImage of a pull whose blobs are
    arriving in the order of their use.
    """

    def __init__(
        self, kind: str, reference: Reference, work: Work, is_over: Callable[[], bool]
    ) -> None:
        self.kind, self.reference = kind, reference
        self.is_kept = self.is_stopped = self.is_begun = False
        # Set by the transfer queue, which orders transfers by them
        self.urgency = self.priority = self.number = 0
        self.users = 0
        self.total = 0
        # Bytes by source
        self.sources: Counter[str] = Counter()
        self.started = self.progressed = time.monotonic()
        self.is_stalled = False
        self.stored: StoredAImage | None = None
        self.result: asyncio.Future[Descriptor] = asyncio.get_running_loop().create_future()
        # asyncio logs exceptions that nothing retrieves
        self.result.add_done_callback(asyncio.Future.exception)
        self._work, self._is_over = work, is_over
        self._blobs: dict[Digest, TransferBlob] = {}
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        self._lock = threading.Lock()

    @property
    def is_queued(self) -> bool:
        """Return True if it waits for other transfers beyond the initial delay."""
        return not self.is_begun and time.monotonic() - self.started > 1.0

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Count a user while the context lasts."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            if not self.users and not self.is_kept and not self.is_begun:
                self.stop()

    @property
    def completed(self) -> int:
        """The number of bytes that are transferred or were there already."""
        return sum(blob.completed for blob in self.list_blobs())

    @property
    def rate(self) -> float:
        """The bytes per second over the last seconds."""
        timestamp = time.monotonic()
        with self._lock:
            recent = [(at, count) for at, count in self._recent if timestamp - at <= _WINDOW]
        if not recent:
            return 0.0
        return sum(count for _, count in recent) / max(timestamp - recent[0][0], INTERVAL)

    def list_blobs(self) -> list[TransferBlob]:
        """Return the current state of all known blobs."""
        with self._lock:
            return [replace(blob) for blob in self._blobs.values()]

    def start(self) -> None:
        """Run in a daemon thread."""
        self.is_begun = True
        self.started = self.progressed = time.monotonic()
        run_in_thread(lambda: self._work(self, self._on_event), self.result, f"aimage-{self.kind}")

    def stop(self, *, is_now: bool = False) -> None:
        """Stop the transfer; a running one stops between two chunks of a blob.

        With ``is_now``, do not wait for its thread: it may hang on an unresponsive registry.
        """
        self.is_stopped = True
        if (is_now or not self.is_begun) and not self.result.done():
            self.result.set_exception(self._make_stopped_error())

    def check(self) -> None:
        """Raise StoppedError if the transfer must stop; called in its thread."""
        if self.is_stopped or self._is_over() or not (self.users or self.is_kept):
            self.is_stopped = True
            raise self._make_stopped_error()

    def _make_stopped_error(self) -> StoppedError:
        return StoppedError(f"the {self.kind} of {self.reference} was cancelled")

    def record_aimage(self, stored: StoredAImage) -> tuple[str, ...]:
        """Record the AImage; return the order of its components. Called in the pull's thread."""
        self.stored = stored
        return COMPONENTS

    def count(self, source: str, count: int) -> None:
        """Count bytes by source: "registry", "mirror" or "neighbour"."""
        with self._lock:
            self.sources[source] += count

    def _on_event(self, event: CopyEvent) -> None:
        # A pull may stop only between chunks of a blob: see TransferGate
        if self.kind == PUSH:
            self.check()
        if event.kind == "plan":
            self.total = event.count
        elif event.content is not None:
            with self._lock:
                self._record(event, event.content)

    def _record(self, event: CopyEvent, content: Descriptor) -> None:
        blob = self._blobs.setdefault(content.digest, TransferBlob(content.digest, content.size))
        if event.kind == "progress":
            blob.completed = max(0, min(blob.total, blob.completed + event.count))
            self.progressed, self.is_stalled = time.monotonic(), False
            if not self._recent or self.progressed - self._recent[-1][0] >= INTERVAL:
                self._recent.append((self.progressed, 0))
            at, count = self._recent[-1]
            self._recent[-1] = at, count + max(0, event.count)
        elif event.kind == "skip":
            blob.completed = blob.total
            self.sources["cache"] += blob.total
        elif event.kind == "done":
            blob.completed = blob.total

    async def watch(self) -> AsyncGenerator[TransferBlob, None]:
        """Yield each blob whose state has changed until the transfer ends.

        Raises StoppedError, otherwise as ``pull`` or ``push``.
        """
        reported: dict[Digest, int] = {}
        while True:
            # Read before the blobs, so that no change is missed
            is_done = self.result.done()
            for blob in self.list_blobs():
                if reported.get(blob.digest) != blob.completed:
                    reported[blob.digest] = blob.completed
                    yield blob
            if is_done:
                break
            await asyncio.wait([self.result], timeout=INTERVAL)
        self.result.result()

    async def wait(self) -> Descriptor:
        """Wait for the end and return the root descriptor. Raises as ``watch``."""
        return await asyncio.shield(self.result)


def run_in_thread(call: Callable[[], T], result: asyncio.Future[T], name: str) -> None:
    """Run ``call`` in a daemon thread; set ``result`` to its result or exception."""
    loop, call = asyncio.get_running_loop(), telemetry.bind_context(call)

    def settle(set_it: Callable[[Any], None], value: object) -> None:
        # The loop is closed
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if result.done() else set_it(value))

    def run() -> None:
        try:
            settle(result.set_result, call())
        except BaseException as error:
            settle(result.set_exception, error)

    threading.Thread(target=run, daemon=True, name=name).start()


class TransferGate(Rate):
    """An unlimited rate that stops a pull between two chunks of a blob.

    At this point partial content is kept for the next pull and no lock is held.
    """

    def __init__(self, transfer: SharedTransfer) -> None:
        super().__init__(1.0)
        self._transfer = transfer

    @property
    def burst(self) -> int:
        return CHUNK_SIZE

    def consume(self, _: int) -> None:
        self._transfer.check()


class CountedSource(WrappedSource):
    """A registry source that counts the bytes of blobs and limits them to ``rate``.

    ``count`` is called with "registry" or "mirror" and the bytes of each reader.
    """

    def __init__(
        self, source: Source, count: Callable[[str, int], None], rate: Rate | None = None
    ) -> None:
        super().__init__(source)
        self._report, self._rate = count, rate

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        reader = self._source.open(content, offset, length)
        if content.media_type in mediatype.DOCUMENTS:
            # Documents are numerous, and read from memory
            return reader

        def report(count: int) -> None:
            source = self._source
            is_mirrored = isinstance(source, Repository) and source.was_mirrored(content)
            self._report("mirror" if is_mirrored else "registry", count)

        return _CountedReader(reader, report, self._rate)


class _CountedReader(SourceReader):
    def __init__(self, source: Reader, report: Callable[[int], None], rate: Rate | None) -> None:
        super().__init__(source)
        self._report, self._rate = report, rate
        self._count = 0

    def _fill(self, view: memoryview) -> int:
        count = self._source.readinto(view[: self._rate.burst] if self._rate else view)
        self._count += count
        if self._rate is not None:
            self._rate.consume(count)
        return count

    def close(self) -> None:
        is_open = not self.closed
        super().close()
        if is_open:
            self._report(self._count)

"""Many blobs over a few connections: the download engine.

One budget of connections serves all blobs. A connection takes a blob that nobody has begun; when
there is none, it joins the blob with most left to fetch and takes a part of what nobody is at, or
half of what a slow connection has still before it. So many small blobs travel side by side, and
the last large one is finished by all connections together.

Parts may arrive in any order: the ingest hashes them in order, from the buffer where it can and
from its file where it must. Nothing is believed before the whole blob's digest holds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from clowder_aimage.content.event import Event, OnEvent
from clowder_aimage.content.parallel import StoppedError, in_parallel
from clowder_aimage.content.rate import Rate
from clowder_aimage.content.store import ContentStore, Ingest, IngestBusyError, Source
from clowder_aimage.content.verify import CHUNK_SIZE, readinto
from clowder_aimage.content.width import Width
from clowder_aimage.errors import VerificationError
from clowder_aimage.oci import Descriptor

SMALL = 16 * 1024 * 1024  # a blob up to this size travels over one connection
NOTED = 16 * 1024 * 1024  # after so many bytes of a large one, what came is made to last
SMALLEST_PART = 4 * 1024 * 1024
LARGEST_PART = 256 * 1024 * 1024  # few requests: each costs the registry and a round trip
_WORTH_SHARING = 0.5  # seconds that a part must still take for half of it to be taken over
_POLL = 0.1  # seconds between looks at a blob that another process is fetching

_Span = tuple[int, int]


def _is_large(content: Descriptor) -> bool:
    """Whether several connections may be at a blob."""
    return content.size > SMALL


class _Part:
    """What one connection fetches of a blob: it has come to ``at``, and stops at ``end``.

    Another connection may move ``end`` closer, never nearer than SMALLEST_PART, which is more
    than is read at a time.
    """

    def __init__(self, start: int, end: int) -> None:
        self.start = self.at = start
        self.end = end
        self._began = time.monotonic()

    @property
    def left(self) -> int:
        return self.end - self.at

    @property
    def is_worth_sharing(self) -> bool:
        """Whether what is left takes long enough for a second connection to pay."""
        elapsed = time.monotonic() - self._began
        if self.left < 2 * SMALLEST_PART or elapsed < _WORTH_SHARING:
            return False
        return self.left * elapsed > (self.at - self.start) * _WORTH_SHARING

    def split(self) -> _Part:
        """Give the second half of what is left to another connection."""
        half = self.left // 2
        middle = self.end - max(SMALLEST_PART, half - half % SMALLEST_PART)
        other, self.end = _Part(middle, self.end), middle
        return other


class _Blob:
    """A blob under way. All fields are guarded by the engine's lock."""

    def __init__(self, content: Descriptor, ingest: Ingest) -> None:
        self.content = content
        self.ingest = ingest
        self.unclaimed: list[_Span] = ingest.missing()
        self.parts: list[_Part] = []  # what connections are at
        self.readers = 0  # they, and those that are about to take a part
        self.ranges = False  # a first part came as asked for: others may join
        self.serial = False  # its server does not do ranges: one connection, from the front

    @property
    def left(self) -> int:
        """The bytes that have not come yet."""
        waiting = sum(end - start for start, end in self.unclaimed)
        return waiting + sum(part.left for part in self.parts)

    @property
    def is_large(self) -> bool:
        return _is_large(self.content)

    def claim(self, sharing: int) -> _Part | None:
        """Take a part that ``sharing`` connections would each take two of, so that all finish
        together; None when others have it all."""
        if not self.unclaimed:
            slow = [part for part in self.parts if part.is_worth_sharing]
            part = max(slow, key=lambda part: part.left).split() if slow else None
        else:
            start, end = self.unclaimed.pop(0)
            if sharing > 1 and not self.serial and self.is_large:
                waiting = end - start + sum(high - low for low, high in self.unclaimed)
                fair = waiting // (2 * sharing) // SMALLEST_PART * SMALLEST_PART
                size = min(LARGEST_PART, max(SMALLEST_PART, fair))
                if end - start > size:
                    self.unclaimed.insert(0, (start + size, end))
                    end = start + size
            part = _Part(start, end)
        if part is not None:
            self.parts.append(part)
        return part

    def give_back(self, part: _Part) -> None:
        """What a connection took and did not fetch."""
        self.parts.remove(part)
        if part.left:
            self.unclaimed = sorted([*self.unclaimed, (part.at, part.end)])

    @property
    def may_be_joined(self) -> bool:
        if self.readers and (self.serial or not self.ranges):
            return False
        return bool(self.unclaimed) or any(part.is_worth_sharing for part in self.parts)


class Fetch:
    """One run of the engine over ``blobs``, the largest first."""

    def __init__(
        self,
        source: Source,
        target: ContentStore,
        blobs: Sequence[Descriptor],
        *,
        connections: int,
        on_event: OnEvent,
        rate: Rate | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._connections = max(1, connections)
        self._on_event = on_event
        self._rate = rate
        self._pending = deque(blobs)
        # what another process is fetching, and when to look at it again
        self._elsewhere: deque[tuple[float, Descriptor]] = deque()
        self._active: list[_Blob] = []
        self._opening = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._width = Width(self._connections)
        self._large = 0  # connections that are at large blobs

    def run(self) -> None:
        """Fetch everything. Raises what the first failing connection raised."""
        if not self._pending:
            return
        try:
            in_parallel([self._connection] * self._connections, self._connections, self._stop)
        except BaseException:
            for blob in self._active:
                blob.ingest.suspend()
            raise

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _connection(self) -> None:
        """One connection's life: take work until there is none."""
        buffer = memoryview(bytearray(CHUNK_SIZE))
        blob: _Blob | None = None
        try:
            while (blob := self._next(blob)) is not None:
                self._take_part(blob, buffer)
                self._leave(blob.content)
        except StoppedError:
            return
        except BaseException:
            self._stop()
            raise

    def _next(self, last: _Blob | None) -> _Blob | None:
        """A blob to take a part of; None at the end.

        The one that this connection alone is at, so that its bytes come in order; else a new one;
        else the one with most left.
        """
        while True:
            with self._changed:
                alone = last is not None and last.unclaimed and not last.readers
                content = last if alone and not self._stopped else self._choose()
                if isinstance(content, _Blob):
                    content.readers += 1
                    self._large += content.is_large
                    return content
                if content is None:
                    return None
                self._opening += 1
                self._large += _is_large(content)
            try:
                blob = self._begin(content)
            finally:
                with self._changed:
                    self._opening -= 1
                    self._changed.notify_all()
            if blob is not None:
                return blob
            self._leave(content)

    def _leave(self, content: Descriptor) -> None:
        """A connection is done with its part of a blob, and free for another."""
        if _is_large(content):
            with self._changed:
                self._large -= 1
                self._changed.notify_all()

    def _choose(self) -> Descriptor | _Blob | None:
        """What to do next, once there is something to do. The lock is held."""
        while True:
            if self._stopped:
                raise StoppedError
            wide = self._large >= self._width.value  # large blobs have all that is worth having
            if self._pending and not (wide and _is_large(self._pending[0])):
                return self._pending.popleft()
            if self._pending and not _is_large(self._pending[-1]):
                return self._pending.pop()
            if not wide or any(not blob.is_large for blob in self._active):
                joinable = [
                    blob
                    for blob in self._active
                    if blob.may_be_joined and not (wide and blob.is_large)
                ]
                if joinable:
                    return max(joinable, key=lambda blob: blob.left)
            if self._elsewhere:
                due, content = self._elsewhere[0]
                if (left := due - time.monotonic()) <= 0:
                    self._elsewhere.popleft()
                    return content
                self._changed.wait(left)
                continue
            if not self._active and not self._opening and not self._pending:
                return None
            self._changed.wait(_WORTH_SHARING)  # a part under way may turn out to be slow

    def _begin(self, content: Descriptor) -> _Blob | None:
        """Open the ingest of a blob; None when there is nothing to fetch, or not for us now."""
        try:
            ingest = self._target.ingest(content.digest.encoded, content)
        except IngestBusyError:
            with self._changed:
                self._elsewhere.append((time.monotonic() + _POLL, content))
            return None
        if self._target.exists(content):  # it was finished while we waited for the ingest
            ingest.abort()
            self._on_event(Event("skip", content, content.size))
            return None
        blob = _Blob(content, ingest)
        self._on_event(Event("start", content, content.size))
        if content.size - blob.left:
            self._on_event(Event("progress", content, content.size - blob.left))
        if not blob.unclaimed:  # all of it was here: only its digest is left to check
            self._finish(blob)
            return None
        with self._changed:
            blob.readers = 1
            self._active.append(blob)
            self._changed.notify_all()
        return blob

    def _take_part(self, blob: _Blob, buffer: memoryview) -> None:
        """Fetch one part of a blob, and finish the blob if that was the last one."""
        with self._changed:
            part = blob.claim(1 if self._pending else self._width.value)
            if part is None:  # others took the rest since
                blob.readers -= 1
                return
        try:
            self._read(blob, part, buffer)
        finally:
            with self._changed:
                blob.readers -= 1
                blob.give_back(part)
                last = not blob.readers and not blob.unclaimed
                if last:
                    self._active.remove(blob)
                    self._opening += 1
                self._changed.notify_all()
        if last:
            try:
                self._finish(blob)
            finally:
                with self._changed:
                    self._opening -= 1
                    self._changed.notify_all()
        else:
            blob.ingest.checkpoint()

    def _read(self, blob: _Blob, part: _Part, buffer: memoryview) -> None:
        """Stream a part into the ingest, as far as it goes by now."""
        content, noted = blob.content, part.at
        with self._source.open(content, part.at, part.left) as reader:
            self._learn(blob, ranges=not getattr(reader, "ignores_range", False))
            while part.left > 0:
                if self._stopped:
                    raise StoppedError
                size = min(part.left, len(buffer), self._rate.burst if self._rate else part.left)
                count = readinto(reader, buffer[:size])
                if not count:
                    raise VerificationError(f"{content.digest} ends after {part.at} bytes")
                blob.ingest.write_at(part.at, buffer[:count])
                part.at += count
                self._passed(blob, count)
                if part.at - noted >= NOTED and part.left:
                    blob.ingest.checkpoint()
                    noted = part.at

    def _passed(self, blob: _Blob, count: int) -> None:
        """So many bytes of a blob came."""
        self._on_event(Event("progress", blob.content, count))
        if blob.is_large and not self._width.settled:
            with self._changed:
                before = self._width.value
                self._width.passed(count, time.monotonic())
                if self._width.value > before:
                    self._changed.notify_all()
        if self._rate is not None:
            self._rate.passed(count)

    def _learn(self, blob: _Blob, *, ranges: bool) -> None:
        """Whether other connections may join is known once a first part begins to come."""
        with self._changed:
            if ranges and not blob.ranges:
                self._changed.notify_all()
            blob.ranges |= ranges
            blob.serial |= not ranges

    def _finish(self, blob: _Blob) -> None:
        blob.ingest.commit(blob.content)
        self._on_event(Event("done", blob.content, blob.content.size))

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

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.chunk import LOOK, BlobTransfer, Chunk, is_large
from clowder_aimage.content.concurrency import ConcurrencyProbe
from clowder_aimage.content.copy_event import CopyEvent
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.content.store import ContentStore, CopyOptions, IngestBusyError, Source
from clowder_aimage.content.verified_reader import readinto
from clowder_aimage.errors import NoSpaceError, VerificationError
from clowder_aimage.oci import Descriptor, Digest

RESERVE = 16 * 1024 * 1024  # bytes that a copy leaves free
NOTED = 16 * 1024 * 1024  # after so many bytes of a large one, what came is made to last
_POLL = 0.1  # seconds between looks at a blob that another process is fetching


def fetch_blobs(
    source: Source, target: ContentStore, blobs: Sequence[Descriptor], options: CopyOptions
) -> None:
    """Fetch those of ``blobs`` that ``target`` does not have, over all connections together.

    Raises:
        NoSpaceError: they would not fit; nothing was fetched.
        ContentError, AccessError: as ``copy`` does.
    """
    missing = [blob for blob in blobs if not target.exists(blob)]
    check_space(missing, target)
    for blob in set(blobs).difference(missing):
        options.on_event(CopyEvent("skip", blob, blob.size))
    with target.batch():
        BlobDownload(source, target, missing, options).run()


def check_space(missing: Sequence[Descriptor], target: ContentStore) -> None:
    """Raise NoSpaceError before the first byte when ``missing`` blobs do not fit."""
    needed = sum(target.missing_size(blob) for blob in missing)
    free = target.free()
    if needed and needed + RESERVE > free:
        raise NoSpaceError(
            f"{needed} bytes are to be fetched, and {max(0, free - RESERVE)} would fit: "
            f"{needed + RESERVE - free} are missing",
            missing_size=needed + RESERVE - free,
            hint="free some space, or point --store at another disk",
        )


class BlobDownload:
    """One run of the engine over ``blobs``, the largest first."""

    def __init__(
        self,
        source: Source,
        target: ContentStore,
        blobs: Sequence[Descriptor],
        options: CopyOptions,
    ) -> None:
        self._source = source
        self._alignment = source.alignment
        self._target = target
        self._connections = max(1, options.concurrency)
        self._on_event = options.on_event
        self._rate = options.rate
        self._pending = deque(blobs)
        # what another process is fetching, and when to look at it again
        self._elsewhere: deque[tuple[float, Descriptor]] = deque()
        self._seen: dict[Digest, int] = {}  # how far that process is with it
        self._active: list[BlobTransfer] = []
        self._opening = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._width = ConcurrencyProbe(self._connections)
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
        buffer = new_buffer()
        blob: BlobTransfer | None = None
        try:
            while (blob := self._next(blob)) is not None:
                self._take_part(blob, buffer)
                self._leave(blob.content)
        except ParallelStoppedError:
            return
        except BaseException:
            self._stop()
            raise

    def _next(self, last: BlobTransfer | None) -> BlobTransfer | None:
        """A blob to take a part of; None at the end.

        The one that this connection alone is at, so that its bytes come in order; else a new one;
        else the one with most left.
        """
        while True:
            with self._changed:
                alone = last is not None and last.unclaimed and not last.readers
                content = last if alone and not self._stopped else self._choose()
                if isinstance(content, BlobTransfer):
                    content.readers += 1
                    self._large += content.is_large
                    return content
                if content is None:
                    return None
                self._opening += 1
                self._large += is_large(content)
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
        if is_large(content):
            with self._changed:
                self._large -= 1
                self._changed.notify_all()

    def _choose(self) -> Descriptor | BlobTransfer | None:
        """What to do next, once there is something to do. The lock is held."""
        while True:
            if self._stopped:
                raise ParallelStoppedError
            wide = self._large >= self._width.value  # large blobs have all that is worth having
            if self._pending and not (wide and is_large(self._pending[0])):
                return self._pending.popleft()
            if self._pending and not is_large(self._pending[-1]):
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
            self._changed.wait(LOOK)  # a part under way may turn out to be slow

    def _begin(self, content: Descriptor) -> BlobTransfer | None:
        """Open the ingest of a blob; None when there is nothing to fetch, or not for us now."""
        try:
            ingest = self._target.ingest(content.digest.encoded, content)
        except IngestBusyError:
            self._watch(content)
            with self._changed:
                self._elsewhere.append((time.monotonic() + _POLL, content))
            return None
        if self._target.exists(content):  # it was finished while we waited for the ingest
            ingest.abort()
            self._on_event(CopyEvent("skip", content, content.size))
            return None
        try:
            if seen := self._seen.pop(content.digest, 0):  # it was killed: what is left is ours now
                self._on_event(CopyEvent("progress", content, -seen))
            blob = BlobTransfer(content, ingest, self._alignment)
            self._on_event(CopyEvent("start", content, content.size))
            if content.size - blob.left:
                self._on_event(CopyEvent("progress", content, content.size - blob.left))
        except BaseException:  # whoever watches may have had enough: nobody must wait for us then
            ingest.suspend()
            raise
        if not blob.unclaimed:  # all of it was here: only its digest is left to check
            self._finish(blob)
            return None
        with self._changed:
            blob.readers = 1
            self._active.append(blob)
            self._changed.notify_all()
        return blob

    def _watch(self, content: Descriptor) -> None:
        """Tell how far another process is with a blob. Only one thread at a time has it."""
        if content.digest not in self._seen:
            self._seen[content.digest] = 0
            self._on_event(CopyEvent("start", content, content.size))
        come = content.size - self._target.missing_size(content)
        if (count := come - self._seen[content.digest]) > 0:
            self._seen[content.digest] = come
            self._on_event(CopyEvent("progress", content, count))

    def _take_part(self, blob: BlobTransfer, buffer: memoryview) -> None:
        """Fetch one part of a blob, and finish the blob if that was the last one."""
        with self._changed:
            alone = self._pending or blob.is_fast
            part = blob.claim(1 if alone else self._width.value)
        try:
            if part is not None:  # else others took the rest since
                self._read(blob, part, buffer)
        except BaseException:
            self._stop()
            raise
        with self._changed:
            blob.readers -= 1
            if part is not None:
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
        elif part is not None:
            blob.ingest.checkpoint()

    def _read(self, blob: BlobTransfer, part: Chunk, buffer: memoryview) -> None:
        """Stream a part into the ingest, as far as it goes by now."""
        content, noted = blob.content, part.at
        with self._source.open(content, part.at, part.left) as reader:
            self._learn(blob, ranges=self._source.supports_ranges(content))
            while part.left > 0:
                if self._stopped:
                    raise ParallelStoppedError
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

    def _passed(self, blob: BlobTransfer, count: int) -> None:
        """So many bytes of a blob came."""
        self._on_event(CopyEvent("progress", blob.content, count))
        if blob.is_large and not self._width.settled:
            with self._changed:
                before = self._width.value
                self._width.passed(count, time.monotonic())
                if self._width.value > before:
                    self._changed.notify_all()
        if self._rate is not None:
            self._rate.passed(count)

    def _learn(self, blob: BlobTransfer, *, ranges: bool) -> None:
        """Whether other connections may join is known once a first part begins to come."""
        with self._changed:
            if ranges and not blob.ranges:
                self._changed.notify_all()
            blob.came(ranges=ranges)

    def _finish(self, blob: BlobTransfer) -> None:
        """Have a blob verified; one that is wrong is fetched again, where there is another place
        to have it from, or where part of it was here before."""
        content = blob.content
        try:
            blob.ingest.commit(content)
        except VerificationError:
            elsewhere = self._source.distrust(content)
            if not elsewhere and not blob.resumed:
                raise
            self._on_event(CopyEvent("progress", content, -content.size))
            with self._changed:
                self._pending.appendleft(content)
            return
        self._on_event(CopyEvent("done", content, content.size))

"""The download engine: many blobs over a few connections.

All blobs share a limited number of connections. A connection begins a new blob; if there is none,
it joins the blob with the most bytes left, and takes an unclaimed chunk, or half of the rest of a
slow one. Chunks may arrive in any order: the ingest hashes them in order, from the buffer if
possible and otherwise from its file. No byte is trusted before the digest of the whole blob is
verified.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.chunk import LOOK, BlobTransfer, Chunk, ConcurrencyProbe, is_large
from clowder_aimage.content.copy_option import CopyEvent, CopyOptions
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.content.store import ContentStore, IngestBusyError, Source
from clowder_aimage.errors import NoSpaceError, VerificationError
from clowder_aimage.oci import Descriptor, Digest

RESERVE = 16 * 1024 * 1024  # bytes that a copy leaves free
NOTED = 16 * 1024 * 1024  # bytes of a large blob between two checkpoints
_NOTICE = 2.0  # seconds after which a process that is waited for is reported
_POLL = 0.1  # seconds between checks of a blob that another process fetches


def fetch_blobs(
    source: Source, target: ContentStore, blobs: Sequence[Descriptor], options: CopyOptions
) -> None:
    """Fetch the ``blobs`` that ``target`` does not have. Raises the errors of ``copy``."""
    missing = [blob for blob in blobs if not target.exists(blob)]
    check_space(missing, target)
    for blob in set(blobs).difference(missing):
        options.on_event(CopyEvent("skip", blob, blob.size))
    with target.batch():
        BlobDownload(source, target, missing, options).run()


def check_space(missing: Sequence[Descriptor], target: ContentStore) -> None:
    """Raise NoSpaceError if the ``missing`` blobs do not fit, before the first byte is fetched."""
    needed = sum(target.missing_size(blob) for blob in missing)
    free = target.free()
    missing_size = needed + RESERVE - free
    if needed and missing_size > 0:
        raise NoSpaceError(
            f"the download requires {needed / 1e6:.1f} MB, "
            f"and {max(0, free - RESERVE) / 1e6:.1f} MB are available",
            missing_size=missing_size,
            hint=f"free at least {-(-missing_size // 10**6)} MB, or use a store on another disk",
        )


class BlobDownload:
    """One run of the engine over ``blobs``, the largest first, or in the order of their use."""

    def __init__(
        self,
        source: Source,
        target: ContentStore,
        blobs: Sequence[Descriptor],
        options: CopyOptions,
    ) -> None:
        self._source, self._target = source, target
        self._alignment = source.alignment
        self._connections = max(1, options.concurrency)
        self._on_event, self._rate = options.on_event, options.rate
        self._is_ordered = options.is_ordered
        self._pending = deque(blobs)
        # blobs that another process fetches, and when to check them again
        self._elsewhere: deque[tuple[float, Descriptor]] = deque()
        self._seen: dict[Digest, int] = {}  # bytes of them that have arrived
        self._busy: dict[Digest, float] = {}  # since when another process fetches them
        self._active: list[BlobTransfer] = []
        self._opening = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._probe = ConcurrencyProbe(self._connections)
        self._large = 0  # connections that fetch large blobs

    def run(self) -> None:
        """Fetch all blobs. Raises the error of the first connection that fails."""
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
        """Fetch chunks over one connection until none are left."""
        buffer = new_buffer()
        blob: BlobTransfer | None = None
        try:
            while (blob := self._next(blob)) is not None:
                self._fetch_chunk(blob, buffer)
                self._leave(blob.content)
        except ParallelStoppedError:
            return

    def _next(self, last: BlobTransfer | None) -> BlobTransfer | None:
        """Return a blob to fetch a chunk of, or None at the end.

        A blob that only this connection fetches comes first, so that its bytes arrive in order;
        then a new blob; then the blob with the most bytes left.
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
        """Record that a connection has finished its chunk of a blob."""
        if is_large(content):
            with self._changed:
                self._large -= 1
                self._changed.notify_all()

    def _choose(self) -> Descriptor | BlobTransfer | None:
        """Wait for the next blob; return None at the end. The caller holds the lock."""
        while True:
            if self._stopped:
                raise ParallelStoppedError
            # more connections would not speed up large blobs
            wide = self._large >= self._probe.value
            if self._pending and not (wide and is_large(self._pending[0])):
                return self._pending.popleft()
            if (small := self._pop_small()) is not None:
                return small
            if not wide or any(not blob.is_large for blob in self._active):
                able = (each for each in self._active if not (wide and each.is_large))
                if joinable := [blob for blob in able if blob.may_be_joined]:
                    return max(joinable, key=lambda blob: 0 if self._is_ordered else blob.left)
            if self._elsewhere:
                due, content = self._elsewhere[0]
                if (left := due - time.monotonic()) <= 0:
                    self._elsewhere.popleft()
                    return content
                self._changed.wait(left)
                continue
            if not self._active and not self._opening and not self._pending:
                return None
            self._changed.wait(LOOK)  # a chunk may turn out to be slow

    def _pop_small(self) -> Descriptor | None:
        """Remove and return a blob that is not large, if any: the smallest, or the first."""
        if not self._is_ordered:
            is_small = self._pending and not is_large(self._pending[-1])
            return self._pending.pop() if is_small else None
        small = next((each for each in self._pending if not is_large(each)), None)
        if small is not None:
            self._pending.remove(small)
        return small

    def _begin(self, content: Descriptor) -> BlobTransfer | None:
        """Open the ingest of a blob; return None if there is nothing to fetch now."""
        try:
            ingest = self._target.ingest(content.digest.encoded, content)
        except IngestBusyError as error:
            self._watch(content)
            now = time.monotonic()
            if now - self._busy.setdefault(content.digest, now) > _NOTICE:
                self._busy[content.digest] = math.inf  # once
                pid = int(error.facts.get("pid") or 0)
                self._on_event(CopyEvent("wait", content, pid))
            with self._changed:
                self._elsewhere.append((time.monotonic() + _POLL, content))
            return None
        if self._target.exists(content):  # another process has finished it meanwhile
            ingest.abort()
            self._on_event(CopyEvent("skip", content, content.size))
            return None
        try:
            if seen := self._seen.pop(content.digest, 0):  # that process ended early
                self._on_event(CopyEvent("progress", content, -seen))
            blob = BlobTransfer(content, ingest, self._alignment)
            self._on_event(CopyEvent("start", content, content.size))
            if content.size - blob.left:
                self._on_event(CopyEvent("progress", content, content.size - blob.left))
        except BaseException:  # a listener raised: other processes must not wait for this one
            ingest.suspend()
            raise
        if not blob.unclaimed:  # all bytes are stored: only the digest must be verified
            self._finish(blob)
            return None
        with self._changed:
            blob.readers = 1
            self._active.append(blob)
            self._changed.notify_all()
        return blob

    def _watch(self, content: Descriptor) -> None:
        """Report the progress of another process. Each blob is watched by one thread at a time."""
        if content.digest not in self._seen:
            self._seen[content.digest] = 0
            self._on_event(CopyEvent("start", content, content.size))
        come = content.size - self._target.missing_size(content)
        if (count := come - self._seen[content.digest]) > 0:
            self._seen[content.digest] = come
            self._on_event(CopyEvent("progress", content, count))

    def _fetch_chunk(self, blob: BlobTransfer, buffer: memoryview) -> None:
        """Fetch one chunk of a blob, and commit the blob after the last one."""
        with self._changed:
            alone = self._pending or blob.is_fast
            part = blob.claim(1 if alone else self._probe.value)
        if part is not None:  # otherwise other connections have the rest
            self._read(blob, part, buffer)
        with self._changed:
            blob.readers -= 1
            if part is not None:
                blob.release(part)
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
        """Stream a chunk into the ingest, up to its end, which another connection may reduce."""
        content, noted = blob.content, part.at
        with self._source.open(content, part.at, part.left) as reader:
            ranges = self._source.supports_ranges(content)
            with self._changed:
                if ranges and not blob.ranges:  # other connections may join
                    self._changed.notify_all()
                blob.began(ranges=ranges)
            while part.left > 0:
                if self._stopped:
                    raise ParallelStoppedError
                size = min(part.left, len(buffer), self._rate.burst if self._rate else part.left)
                count = reader.readinto(buffer[:size])
                if not count:
                    raise VerificationError(f"{content.digest} ended after {part.at} bytes")
                blob.ingest.write_at(part.at, buffer[:count])
                part.at += count
                self._passed(blob, count)
                if part.at - noted >= NOTED and part.left:
                    blob.ingest.checkpoint()
                    noted = part.at

    def _passed(self, blob: BlobTransfer, count: int) -> None:
        """Account for received bytes of a blob."""
        self._on_event(CopyEvent("progress", blob.content, count))
        if blob.is_large and not self._probe.settled:
            with self._changed:
                before = self._probe.value
                self._probe.passed(count, time.monotonic())
                if self._probe.value > before:
                    self._changed.notify_all()
        if self._rate is not None:
            self._rate.passed(count)

    def _finish(self, blob: BlobTransfer) -> None:
        """Verify a blob.

        A wrong blob is fetched again if the source has another origin for it, or if part of it is
        from an earlier run.
        """
        content = blob.content
        try:
            blob.ingest.commit(content)
        except VerificationError:
            if not self._source.invalidate(content) and not blob.resumed:
                raise
            self._on_event(CopyEvent("progress", content, -content.size))
            with self._changed:
                self._pending.appendleft(content)
            return
        self._on_event(CopyEvent("done", content, content.size))

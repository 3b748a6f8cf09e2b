"""The download engine: many blobs over a few connections.

All blobs share a limited number of connections. A connection begins a new blob; if there is none,
it joins the blob with the most remaining bytes, and takes an unclaimed chunk, or half of a slow
one. Chunks may arrive in any order: the ingest hashes them in order, from the buffer if
possible and otherwise from its file. No byte is trusted before the digest of the whole blob is
verified.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from clowder_aimage.content.buffer import CHUNK_SIZE, LARGEST_READ
from clowder_aimage.content.chunk import (
    MEASURING_TIME,
    BlobTransfer,
    Chunk,
    ConcurrencyProbe,
    SmallConcurrency,
    is_large,
)
from clowder_aimage.content.copy_option import CopyEvent, CopyOptions
from clowder_aimage.content.parallel import ParallelStoppedError, run_parallel
from clowder_aimage.content.store import ContentStore, IngestBusyError, Source
from clowder_aimage.content.write_behind import (
    BEHIND_SIZE,
    EXTRA_BUFFERS,
    BufferPool,
    WriteBehind,
)
from clowder_aimage.errors import NoSpaceError, VerificationError
from clowder_aimage.oci import Descriptor, Digest

# Bytes that a copy leaves free
RESERVE = 16 * 1024 * 1024
# Bytes of a large blob between two checkpoints. A read more may be written before the next one.
NOTED = 12 * 1024 * 1024
# Bytes of the smallest read of a large blob, and of all buffers that are filled
_SMALL_READ, _FILLED = 256 * 1024, 7 * 1024 * 1024
# Seconds of a read: progress is shown after each one
_QUICK, _SLOW = 0.1, 0.4
# Seconds after which a process that is waited for is reported
_NOTICE = 2.0
# Seconds between checks of a blob that another process fetches
_POLL = 0.1


def fetch_blobs(
    source: Source, target: ContentStore, blobs: Sequence[Descriptor], options: CopyOptions
) -> None:
    """Fetch the ``blobs`` that ``target`` does not have. Raises the errors of ``copy``."""
    missing = [blob for blob in blobs if not target.exists(blob)]
    check_space(missing, target)
    for blob in set(blobs).difference(missing):
        options.on_event(CopyEvent("skip", blob, blob.size))
    with target.begin_batch():
        BlobDownload(source, target, missing, options).run()


def check_space(missing: Sequence[Descriptor], target: ContentStore) -> None:
    """Raise NoSpaceError if the ``missing`` blobs do not fit, before the first byte is fetched."""
    needed = sum(target.compute_missing_size(blob) for blob in missing)
    free = target.measure_free()
    missing_size = needed + RESERVE - free
    if needed and missing_size > 0:
        raise NoSpaceError(
            f"the download requires {needed / 1e6:.1f} MB, "
            f"and {max(0, free - RESERVE) / 1e6:.1f} MB are available besides the "
            f"{RESERVE / 1e6:.1f} MB that stay free",
            missing_size=missing_size,
            hint=f"free at least {-(-missing_size // 10**6)} MB, or use a store on another disk",
        )


class BlobDownload:
    """A run of the engine over ``blobs``, the largest first, or in the order of their use."""

    def __init__(
        self,
        source: Source,
        target: ContentStore,
        blobs: Sequence[Descriptor],
        options: CopyOptions,
    ) -> None:
        self._source, self._target = source, target
        self._alignment = source.alignment
        usual = max(1, options.concurrency)
        self._usual, self._connections = usual, max(usual, options.max_concurrency)
        self._on_event, self._rate = options.on_event, options.rate
        self._is_ordered = options.is_ordered
        self._pending = deque(blobs)
        # Blobs that another process fetches, with the times of their next check.
        self._elsewhere: deque[tuple[float, Descriptor]] = deque()
        # The reported bytes of each of them.
        self._reported: dict[Digest, int] = {}
        # The time since which another process fetches them.
        self._busy: dict[Digest, float] = {}
        self._active: list[BlobTransfer] = []
        self._opening = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self._buffers = BufferPool()
        cores = os.cpu_count() or 1
        self._probe = ConcurrencyProbe(self._connections, cores)
        # Connections that fetch large and small blobs
        self._large = self._small = 0
        self._small_concurrency = SmallConcurrency(usual, cores)
        # Connections that small blobs do not need wait here, without waking up for each blob
        self._needed = threading.Condition(self._lock)

    def run(self) -> None:
        """Fetch all blobs. Raises the error of the first connection that fails."""
        if not self._pending:
            return
        try:
            run_parallel([self._run_connection] * self._connections, self._connections, self._stop)
        except BaseException:
            for blob in self._active:
                blob.ingest.suspend()
            raise

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._needed.notify_all()

    def _run_connection(self) -> None:
        """Fetch chunks over one connection until none are left."""
        writes = WriteBehind(self._buffers)
        blob: BlobTransfer | None = None
        try:
            while (blob := self._take_next(blob)) is not None:
                self._fetch_chunk(blob, writes)
                self._leave(blob.content)
        except ParallelStoppedError:
            return
        finally:
            writes.close()

    def _take_next(self, current: BlobTransfer | None) -> BlobTransfer | None:
        """Return a blob to fetch a chunk of, or None at the end.

        A blob that only this connection fetches comes first, so that its bytes arrive in order;
        then a new blob; then the blob with the most bytes left.
        """
        while True:
            with self._changed:
                is_alone = current is not None and current.unclaimed and not current.readers
                content = current if is_alone and not self._stopped else self._choose()
                if isinstance(content, BlobTransfer):
                    content.readers += 1
                    self._join(content.content, 1)
                    return content
                if content is None:
                    return None
                self._opening += 1
                self._join(content, 1)
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
        with self._changed:
            self._join(content, -1)
            if is_large(content):
                self._changed.notify_all()

    def _join(self, content: Descriptor, count: int) -> None:
        """Count a connection that fetches a blob, or has fetched. The caller holds the lock."""
        if is_large(content):
            self._large += count
        else:
            self._small += count

    def _choose(self) -> Descriptor | BlobTransfer | None:
        """Wait for the next blob; return None at the end. The caller holds the lock."""
        while True:
            if self._stopped:
                raise ParallelStoppedError
            if self._is_unneeded():
                self._needed.wait(MEASURING_TIME if self._small_concurrency.may_grow else None)
                continue
            if (content := self._choose_now()) is not None:
                return content
            if self._elsewhere:
                due, content = self._elsewhere[0]
                if (wait := due - time.monotonic()) <= 0:
                    self._elsewhere.popleft()
                    return content
                self._changed.wait(wait)
                continue
            if not self._active and not self._opening and not self._pending:
                return None
            # Wake up without a signal: a chunk may have become slow enough to be shared.
            self._changed.wait(MEASURING_TIME)

    def _choose_now(self) -> Descriptor | BlobTransfer | None:
        """Return a new blob, else one that another connection may join, if there is any."""
        # More connections would not speed up large blobs
        is_saturated = self._large >= self._probe.value
        if self._pending and not (is_saturated and self._is_next_large()):
            content = self._pending.popleft()
            if not self._pending or is_large(self._pending[0]):
                self._needed.notify_all()
            return content
        if (small := self._pop_small()) is not None:
            return small
        joinable = [
            blob
            for blob in self._active
            if not (is_saturated and blob.is_large) and blob.may_be_joined
        ]
        return max(joinable, key=lambda blob: 0 if self._is_ordered else blob.left, default=None)

    def _is_unneeded(self) -> bool:
        """Return True for a connection that would not speed up the small blobs, which are next."""
        if not self._pending or is_large(self._pending[0]):
            return False
        concurrency = self._small_concurrency
        if concurrency.may_grow and concurrency.record(time.monotonic(), time.process_time()):
            self._needed.notify_all()
        return self._small >= self._small_concurrency.value

    def _is_next_large(self) -> bool:
        return bool(self._pending) and is_large(self._pending[0])

    def _pop_small(self) -> Descriptor | None:
        """Remove and return a blob that is not large, if any: the smallest, or the first."""
        if not self._is_ordered:
            is_small = self._pending and not is_large(self._pending[-1])
            return self._pending.pop() if is_small else None
        small = next((blob for blob in self._pending if not is_large(blob)), None)
        if small is not None:
            self._pending.remove(small)
        return small

    def _begin(self, content: Descriptor) -> BlobTransfer | None:
        """Open the ingest of a blob; return None if this connection has no bytes to fetch."""
        try:
            ingest = self._target.ingest(content.digest.encoded, content)
        except IngestBusyError as error:
            self._watch(content)
            timestamp = time.monotonic()
            if timestamp - self._busy.setdefault(content.digest, timestamp) > _NOTICE:
                # Report it once.
                self._busy[content.digest] = math.inf
                pid = int(error.facts.get("pid") or 0)
                self._on_event(CopyEvent("wait", content, pid))
            with self._changed:
                self._elsewhere.append((time.monotonic() + _POLL, content))
            return None
        # Another process has finished it meanwhile
        if self._target.exists(content):
            ingest.abort()
            self._on_event(CopyEvent("skip", content, content.size))
            return None
        try:
            # The other process ended early: its progress is taken back.
            if reported := self._reported.pop(content.digest, 0):
                self._on_event(CopyEvent("progress", content, -reported))
            blob = BlobTransfer(content, ingest, self._alignment)
            self._on_event(CopyEvent("start", content, content.size))
            if content.size - blob.left:
                self._on_event(CopyEvent("progress", content, content.size - blob.left))
        except BaseException:
            # A listener raised: other processes must not wait for this one
            ingest.suspend()
            raise
        # All bytes are stored: only the digest must be verified
        if not blob.unclaimed:
            self._finish(blob)
            return None
        with self._changed:
            blob.readers = 1
            self._active.append(blob)
            self._changed.notify_all()
        return blob

    def _watch(self, content: Descriptor) -> None:
        """Report the progress of another process. Each blob is watched by one thread at a time."""
        if content.digest not in self._reported:
            self._reported[content.digest] = 0
            self._on_event(CopyEvent("start", content, content.size))
        arrived = content.size - self._target.compute_missing_size(content)
        if (count := arrived - self._reported[content.digest]) > 0:
            self._reported[content.digest] = arrived
            self._on_event(CopyEvent("progress", content, count))

    def _fetch_chunk(self, blob: BlobTransfer, writes: WriteBehind) -> None:
        """Fetch one chunk of a blob, and commit the blob after the last one."""
        with self._changed:
            is_alone = self._is_next_large() or len(self._pending) >= self._usual
            sharing = 1 if is_alone or blob.is_fast else self._probe.expected
            chunk = blob.claim(sharing)
        # Without a chunk, other connections fetch all that is left.
        if chunk is not None:
            self._read(blob, chunk, writes)
        with self._changed:
            blob.readers -= 1
            if chunk is not None:
                blob.release(chunk)
            is_last = not blob.readers and not blob.unclaimed
            if is_last:
                self._active.remove(blob)
                self._opening += 1
            self._changed.notify_all()
        if is_last:
            try:
                self._finish(blob)
            finally:
                with self._changed:
                    self._opening -= 1
                    self._changed.notify_all()
        elif chunk is not None:
            blob.ingest.checkpoint()

    def _read(self, blob: BlobTransfer, chunk: Chunk, writes: WriteBehind) -> None:
        """Stream a chunk into the ingest, up to its end. Another connection may reduce the end."""
        content, noted, step = blob.content, chunk.at, CHUNK_SIZE
        write = writes.write if content.size >= BEHIND_SIZE else writes.write_now
        opened = self._source.open(content, chunk.at, chunk.left)
        with opened as reader, writes.flushing(reader):
            ranges = self._source.supports_ranges(content)
            with self._changed:
                # Other connections may join
                if ranges and not blob.ranges:
                    self._changed.notify_all()
                blob.record_start(ranges=ranges)
            while chunk.left > 0:
                if self._stopped:
                    raise ParallelStoppedError
                buffer = writes.take()
                size = min(chunk.left, step, self._find_largest_read(blob))
                started = time.monotonic()
                count = reader.readinto(buffer[:size])
                step = _adapt_step(step, time.monotonic() - started)
                if not count:
                    raise VerificationError(f"{content.digest} ended after {chunk.at} bytes")
                write(blob.ingest, chunk.at, buffer, count)
                chunk.at += count
                blob.is_behind = writes.is_behind
                self._record(blob, count)
                if chunk.at - noted >= NOTED and chunk.left:
                    writes.checkpoint(blob.ingest)
                    noted = chunk.at

    def _find_largest_read(self, blob: BlobTransfer) -> int:
        """Return the most bytes of one read: many connections use little of their buffers."""
        size = CHUNK_SIZE
        if blob.is_large:
            share = _FILLED // (self._large + EXTRA_BUFFERS) // _SMALL_READ * _SMALL_READ
            size = min(LARGEST_READ, max(_SMALL_READ, share))
        return min(size, self._rate.burst) if self._rate else size

    def _record(self, blob: BlobTransfer, count: int) -> None:
        """Account for received bytes of a blob."""
        self._on_event(CopyEvent("progress", blob.content, count))
        if blob.is_large and not self._probe.settled:
            with self._changed:
                before = self._probe.value
                self._probe.record(count, time.monotonic(), time.process_time())
                if self._probe.value > before:
                    self._changed.notify_all()
        if self._rate is not None:
            self._rate.consume(count)

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


def _adapt_step(step: int, seconds: float) -> int:
    """Return the bytes of the next read, after one of ``step`` bytes took so many seconds."""
    if seconds < _QUICK:
        return min(2 * step, LARGEST_READ)
    return max(step // 2, _SMALL_READ) if seconds > _SLOW else step

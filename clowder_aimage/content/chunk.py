"""The transfer of a blob, and its chunks."""

from __future__ import annotations

import math
import time

from clowder_aimage.content.store import Ingest
from clowder_aimage.oci import Descriptor

# Bytes. A blob up to this size uses one connection.
SMALL = 16 * 1024 * 1024
SMALLEST_CHUNK = 4 * 1024 * 1024
# Each request costs a round trip, and work of the registry.
LARGEST_CHUNK = 256 * 1024 * 1024
# Seconds that a chunk must still need to be split.
WORTH_SHARING = 0.5

# Seconds to measure the speed of a blob's first connection.
MEASURING_TIME = 0.1

START = 3
# Fraction of the speed of earlier connections that new ones must reach
_SHARE = 0.5
# Seconds before the speed of new connections counts
_WARM = 0.1
# Minimum seconds over which a rate is measured
_WINDOW = 0.25
# Measurements that new connections get to reach their speed
_CHANCES = 3
# Bytes per second over one connection that counts as unlimited
PLENTY = 256 * 1024 * 1024
# Minimum bytes per connection over which a rate is measured
_LEAST = 4 * 1024 * 1024
# Fraction of a core that a process uses if it is what limits the transfer
_BUSY = 0.5

_Range = tuple[int, int]


def is_large(content: Descriptor) -> bool:
    """Return True if several connections may fetch a blob together."""
    return content.size > SMALL


class Chunk:
    """The range of a blob that one connection fetches, from its current offset ``at`` to ``end``.

    Another connection may reduce ``end``, leaving at least SMALLEST_CHUNK: more than the size of
    one read.
    """

    def __init__(self, start: int, end: int, alignment: int = 1) -> None:
        self.start, self.at, self.end = start, start, end
        self._alignment = alignment
        self._began = time.monotonic()

    @property
    def left(self) -> int:
        return self.end - self.at

    @property
    def is_worth_sharing(self) -> bool:
        """Return True if the remaining bytes take long enough to justify a second connection."""
        elapsed = time.monotonic() - self._began
        if self.left < 2 * SMALLEST_CHUNK or elapsed < WORTH_SHARING:
            return False
        if not self.at + SMALLEST_CHUNK <= self._middle < self.end:
            return False
        return self.left * elapsed > (self.at - self.start) * WORTH_SHARING

    def split(self) -> Chunk:
        """Move the second half of the remaining bytes into a new chunk."""
        middle = self._middle
        second, self.end = Chunk(middle, self.end, self._alignment), middle
        return second

    @property
    def _middle(self) -> int:
        """Return the offset of a split: a multiple of the source's alignment."""
        half = self.left // 2
        middle = self.end - max(SMALLEST_CHUNK, half - half % SMALLEST_CHUNK)
        return -(-middle // self._alignment) * self._alignment


class BlobTransfer:
    """The transfer of one blob. All fields are guarded by the engine's lock."""

    def __init__(self, content: Descriptor, ingest: Ingest, alignment: int = 1) -> None:
        self.content, self.ingest = content, ingest
        # Chunks end at its multiples.
        self._alignment = alignment
        self.unclaimed: list[_Range] = ingest.list_missing()
        self._missing = self.left_unclaimed
        # The time of its first byte.
        self._began = math.inf
        # True if an earlier run stored some of its bytes.
        self.resumed = self._missing != content.size
        # Chunks that are being fetched.
        self.chunks: list[Chunk] = []
        # Connections that fetch chunks, or are about to claim one.
        self.readers = 0
        # True if the first chunk arrived as a range: other connections may join.
        self.ranges = False
        # True if the server ignores ranges: one connection, from the front.
        self.serial = False
        # True if its bytes arrive faster than they are hashed and written.
        self.is_behind = False

    @property
    def left_unclaimed(self) -> int:
        return sum(end - start for start, end in self.unclaimed)

    @property
    def left(self) -> int:
        """Return the number of bytes that have not arrived yet."""
        return self.left_unclaimed + sum(chunk.left for chunk in self.chunks)

    def record_start(self, *, ranges: bool) -> None:
        """Record that a chunk begins to arrive, as a range or from the front of the blob."""
        self._began = min(self._began, time.monotonic())
        self.ranges |= ranges
        self.serial |= not ranges

    @property
    def _age(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_fast(self) -> bool:
        """Return True if the connections are faster than the hash or the disk.

        More connections would only fetch chunks that must be read again for the hash.
        """
        if self.is_behind:
            return True
        arrived = self._missing - self.left
        return self._age >= MEASURING_TIME and arrived >= PLENTY * self._age * max(
            1, len(self.chunks)
        )

    @property
    def is_large(self) -> bool:
        return is_large(self.content)

    def claim(self, sharing: int) -> Chunk | None:
        """Return a chunk to fetch, or None if all chunks are claimed.

        It has half of the share of each of ``sharing`` connections, so that all end together.
        """
        if not self.unclaimed:
            slow = [chunk for chunk in self.chunks if chunk.is_worth_sharing]
            chunk = max(slow, key=lambda chunk: chunk.left).split() if slow else None
        else:
            start, end = self.unclaimed.pop(0)
            if sharing > 1 and not self.serial and self.is_large:
                waiting = end - start + self.left_unclaimed
                fair = waiting // (2 * sharing) // SMALLEST_CHUNK * SMALLEST_CHUNK
                size = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, fair))
                middle = -(-(start + size) // self._alignment) * self._alignment
                if middle < end:
                    self.unclaimed.insert(0, (middle, end))
                    end = middle
            chunk = Chunk(start, end, self._alignment)
        if chunk is not None:
            self.chunks.append(chunk)
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Give the bytes of a chunk that were not fetched back to the blob."""
        self.chunks.remove(chunk)
        if chunk.left:
            self.unclaimed = sorted([*self.unclaimed, (chunk.at, chunk.end)])

    @property
    def may_be_joined(self) -> bool:
        if self.readers and (self.serial or not self.ranges):
            return False
        if self.readers and (self._age < MEASURING_TIME or self.is_fast):
            return False
        return bool(self.unclaimed) or any(chunk.is_worth_sharing for chunk in self.chunks)


class SmallConcurrency:
    """The number of connections for small blobs: by cores, and more if they mostly wait.

    Each blob costs this process time. More connections than cores only wait for each other, unless
    the link, or the round trip to the registry, is what they wait for.
    """

    def __init__(self, limit: int, cores: int) -> None:
        self.value = min(max(START, cores + 1), limit)
        self._limit = limit
        self._began: tuple[float, float] | None = None

    @property
    def may_grow(self) -> bool:
        return self.value < self._limit

    def record(self, timestamp: float, used: float) -> bool:
        """Account for the processor time ``used`` by this process until ``timestamp``.

        Returns True if the number has grown.
        """
        if self._began is None:
            self._began = timestamp, used
            return False
        elapsed, before = timestamp - self._began[0], self.value
        if elapsed < MEASURING_TIME:
            return False
        if used - self._began[1] < _BUSY * elapsed:
            self.value = min(self._limit, 2 * self.value)
        self._began = timestamp, used
        return self.value > before


class ConcurrencyProbe:
    """The number of connections, doubled while the speed grows with it.

    If each connection is limited (by an object store, or a long round trip), more connections
    increase the speed. If the machine or the link is the limit, they only make chunks arrive out of
    order. These must be read again for the hash. A process that uses a core, or half of ``cores``,
    is not waiting for the link.
    """

    def __init__(self, limit: int, cores: int = 1) -> None:
        self.value = min(START, limit)
        self._limit = limit
        self._busy = _BUSY * max(1, cores // 2)
        # The processor time before the measurement.
        self._used = 0.0
        # Bytes per second with fewer connections.
        self._before = 0.0
        self._previous = self.value
        self._began: float | None = None
        self._bytes = 0
        self._chances = _CHANCES
        self.settled = self.value == limit

    @property
    def expected(self) -> int:
        """The number of connections to plan for: while it is measured, the limit."""
        return self.value if self.settled else self._limit

    def record(self, count: int, timestamp: float, used: float = 0.0) -> None:
        """Account for ``count`` bytes that have arrived by ``timestamp``, in seconds.

        ``used`` is the processor time of this process until then.
        """
        if self.settled:
            return
        if self._began is None:
            self._began = timestamp + _WARM
        if timestamp <= self._began:
            self._used = used
            return
        # A short measurement is noise.
        self._bytes += count
        elapsed = timestamp - self._began
        if elapsed < _WINDOW or self._bytes < _LEAST * self.value:
            return
        rate = self._bytes / elapsed
        required = 1 + _SHARE * (self.value / self._previous - 1)
        self._chances -= 1
        if rate < self._before * required and self._chances:
            self._began, self._bytes = timestamp, 0
            return
        if rate < self._before * required:
            self.value, self.settled = self._previous, True
            return
        if rate > PLENTY * self.value or used - self._used > self._busy * elapsed:
            self.settled = True
            return
        self._before, self._previous = rate, self.value
        self.value = min(self._limit, 2 * self.value)
        self.settled = self.value == self._previous
        self._began, self._bytes, self._chances = None, 0, _CHANCES

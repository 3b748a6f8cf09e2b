"""The transfer of a blob, and its chunks."""

from __future__ import annotations

import math
import time

from clowder_aimage.content.store import Ingest
from clowder_aimage.oci import Descriptor

SMALL = 16 * 1024 * 1024  # bytes; a blob up to this size uses one connection
SMALLEST_PART = 4 * 1024 * 1024
LARGEST_PART = 256 * 1024 * 1024  # each request costs the registry and a round trip
WORTH_SHARING = 0.5  # seconds that a part must still need to be split

LOOK = 0.1  # seconds to measure the speed of a blob's first connection

START = 3
_SHARE = 0.5  # fraction of the speed of earlier connections that new ones must reach
_WARM = 0.2  # seconds before the speed of new connections counts
_WINDOW = 0.4  # minimum seconds over which a rate is measured
PLENTY = 256 * 1024 * 1024  # bytes per second over one connection that counts as unlimited
_LEAST = 4 * 1024 * 1024  # minimum bytes per connection over which a rate is measured

_Span = tuple[int, int]


def is_large(content: Descriptor) -> bool:
    """Return True if several connections may fetch a blob together."""
    return content.size > SMALL


class Chunk:
    """The part of a blob that one connection fetches, from its current offset ``at`` to ``end``.

    Another connection may reduce ``end``, leaving at least SMALLEST_PART, which is more than the
    size of one read.
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
        """Return True if the rest takes long enough to justify a second connection."""
        elapsed = time.monotonic() - self._began
        if self.left < 2 * SMALLEST_PART or elapsed < WORTH_SHARING:
            return False
        if not self.at + SMALLEST_PART <= self._middle < self.end:
            return False
        return self.left * elapsed > (self.at - self.start) * WORTH_SHARING

    def split(self) -> Chunk:
        """Move the second half of the rest into a new chunk, for another connection."""
        middle = self._middle
        other, self.end = Chunk(middle, self.end, self._alignment), middle
        return other

    @property
    def _middle(self) -> int:
        """Return the offset of a split: a multiple of the source's alignment."""
        half = self.left // 2
        middle = self.end - max(SMALLEST_PART, half - half % SMALLEST_PART)
        return -(-middle // self._alignment) * self._alignment


class BlobTransfer:
    """The transfer of one blob. All fields are guarded by the engine's lock."""

    def __init__(self, content: Descriptor, ingest: Ingest, alignment: int = 1) -> None:
        self.content, self.ingest = content, ingest
        self._alignment = alignment  # parts end at its multiples
        self.unclaimed: list[_Span] = ingest.missing()
        self._missing = self.left_unclaimed
        self._began = math.inf  # when its first byte arrived
        self.resumed = self._missing != content.size  # part of it was stored earlier
        self.parts: list[Chunk] = []  # being fetched
        self.readers = 0  # connections that fetch parts, or are about to claim one
        self.ranges = False  # the first chunk arrived as a range: other connections may join
        self.serial = False  # the server ignores ranges: one connection, from the front

    @property
    def left_unclaimed(self) -> int:
        return sum(end - start for start, end in self.unclaimed)

    @property
    def left(self) -> int:
        """Return the number of bytes that have not arrived yet."""
        return self.left_unclaimed + sum(part.left for part in self.parts)

    def began(self, *, ranges: bool) -> None:
        """Record that a chunk begins to arrive, as a range or from the front of the blob."""
        self._began = min(self._began, time.monotonic())
        self.ranges |= ranges
        self.serial |= not ranges

    @property
    def _age(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_fast(self) -> bool:
        """Return True if the connections are faster than the hash.

        More connections would only fetch chunks that must be read again for the hash.
        """
        come = self._missing - self.left
        return self._age >= LOOK and come >= PLENTY * self._age * max(1, len(self.parts))

    @property
    def is_large(self) -> bool:
        return is_large(self.content)

    def claim(self, sharing: int) -> Chunk | None:
        """Return a chunk to fetch, or None if all chunks are claimed.

        It has half a fair share of the rest for ``sharing`` connections, so that all end together.
        """
        if not self.unclaimed:
            slow = [part for part in self.parts if part.is_worth_sharing]
            part = max(slow, key=lambda part: part.left).split() if slow else None
        else:
            start, end = self.unclaimed.pop(0)
            if sharing > 1 and not self.serial and self.is_large:
                waiting = end - start + self.left_unclaimed
                fair = waiting // (2 * sharing) // SMALLEST_PART * SMALLEST_PART
                size = min(LARGEST_PART, max(SMALLEST_PART, fair))
                middle = -(-(start + size) // self._alignment) * self._alignment
                if middle < end:
                    self.unclaimed.insert(0, (middle, end))
                    end = middle
            part = Chunk(start, end, self._alignment)
        if part is not None:
            self.parts.append(part)
        return part

    def release(self, part: Chunk) -> None:
        """Give the bytes of a chunk that were not fetched back to the blob."""
        self.parts.remove(part)
        if part.left:
            self.unclaimed = sorted([*self.unclaimed, (part.at, part.end)])

    @property
    def may_be_joined(self) -> bool:
        if self.readers and (self.serial or not self.ranges):
            return False
        if self.readers and (self._age < LOOK or self.is_fast):
            return False
        return bool(self.unclaimed) or any(part.is_worth_sharing for part in self.parts)


class ConcurrencyProbe:
    """The number of connections, doubled while the speed grows with it.

    If each connection is limited (by an object store, or a long round trip), more connections
    increase the speed. If the machine or the link is the limit, they only make chunks arrive out of
    order, which must be read again for the hash.
    """

    def __init__(self, limit: int) -> None:
        self.value = min(START, limit)
        self._limit = limit
        self._before = 0.0  # bytes per second, with fewer connections
        self._previous = self.value
        self._began: float | None = None
        self._bytes = 0
        self.settled = self.value == limit

    def passed(self, count: int, now: float) -> None:
        """Account for ``count`` bytes that have arrived by ``now``, in seconds."""
        if self.settled:
            return
        if self._began is None:
            self._began = now + _WARM
        if now <= self._began:
            return
        self._bytes += count
        elapsed = now - self._began
        if elapsed < _WINDOW or self._bytes < _LEAST * self.value:
            return
        rate = self._bytes / elapsed
        wanted = 1 + _SHARE * (self.value / self._previous - 1)
        if rate < self._before * wanted:
            self.value, self.settled = self._previous, True
            return
        if rate > PLENTY * self.value:
            self.settled = True
            return
        self._before, self._previous = rate, self.value
        self.value = min(self._limit, 2 * self.value)
        self.settled = self.value == self._previous
        self._began, self._bytes = None, 0

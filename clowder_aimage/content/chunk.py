"""A blob under way, and the parts of it that connections are at."""

from __future__ import annotations

import math
import time

from clowder_aimage.content.concurrency import PLENTY
from clowder_aimage.content.store import Ingest
from clowder_aimage.oci import Descriptor

SMALL = 16 * 1024 * 1024  # a blob up to this size travels over one connection
SMALLEST_PART = 4 * 1024 * 1024
LARGEST_PART = 256 * 1024 * 1024  # few requests: each costs the registry and a round trip
WORTH_SHARING = 0.5  # seconds that a part must still take for half of it to be taken over

LOOK = 0.1  # seconds that a blob's first connection gets to show how fast it is

_Span = tuple[int, int]


def is_large(content: Descriptor) -> bool:
    """Whether several connections may be at a blob."""
    return content.size > SMALL


class Chunk:
    """What one connection fetches of a blob: it has come to ``at``, and stops at ``end``.

    Another connection may move ``end`` closer, never nearer than SMALLEST_PART, which is more
    than is read at a time.
    """

    def __init__(self, start: int, end: int, alignment: int = 1) -> None:
        self.start = self.at = start
        self.end = end
        self._alignment = alignment
        self._began = time.monotonic()

    @property
    def left(self) -> int:
        return self.end - self.at

    @property
    def is_worth_sharing(self) -> bool:
        """Whether what is left takes long enough for a second connection to pay."""
        elapsed = time.monotonic() - self._began
        if self.left < 2 * SMALLEST_PART or elapsed < WORTH_SHARING:
            return False
        if not self.at + SMALLEST_PART <= self._middle < self.end:
            return False
        return self.left * elapsed > (self.at - self.start) * WORTH_SHARING

    def split(self) -> Chunk:
        """Give the second half of what is left to another connection."""
        middle = self._middle
        other, self.end = Chunk(middle, self.end, self._alignment), middle
        return other

    @property
    def _middle(self) -> int:
        """Where it is split: at a multiple of the source's alignment."""
        half = self.left // 2
        middle = self.end - max(SMALLEST_PART, half - half % SMALLEST_PART)
        return -(-middle // self._alignment) * self._alignment


class BlobTransfer:
    """A blob under way. All fields are guarded by the engine's lock."""

    def __init__(self, content: Descriptor, ingest: Ingest, alignment: int = 1) -> None:
        self.content = content
        self.ingest = ingest
        self._alignment = alignment  # parts end where a multiple of it does
        self.unclaimed: list[_Span] = ingest.missing()
        self._missing = self.left_unclaimed
        self._began = math.inf  # when its first byte came
        self.resumed = self._missing != content.size  # part of it was here before
        self.parts: list[Chunk] = []  # what connections are at
        self.readers = 0  # they, and those that are about to take a part
        self.ranges = False  # a first part came as asked for: others may join
        self.serial = False  # its server does not do ranges: one connection, from the front

    @property
    def left_unclaimed(self) -> int:
        return sum(end - start for start, end in self.unclaimed)

    @property
    def left(self) -> int:
        """The bytes that have not come yet."""
        return self.left_unclaimed + sum(part.left for part in self.parts)

    def came(self, *, ranges: bool) -> None:
        """A part begins to come, as a range or from the front of it all."""
        self._began = min(self._began, time.monotonic())
        self.ranges |= ranges
        self.serial |= not ranges

    @property
    def _age(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_fast(self) -> bool:
        """Whether nothing holds its connections back: then the hash is what it takes, and others
        would only bring parts that must be read again for it."""
        come = self._missing - self.left
        return self._age >= LOOK and come >= PLENTY * self._age * max(1, len(self.parts))

    @property
    def is_large(self) -> bool:
        return is_large(self.content)

    def claim(self, sharing: int) -> Chunk | None:
        """Take a part that ``sharing`` connections would each take two of, so that all finish
        together; None when others have it all."""
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

    def give_back(self, part: Chunk) -> None:
        """What a connection took and did not fetch."""
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

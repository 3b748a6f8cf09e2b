"""The disk's watermarks, and the eviction above the upper one.

As kubelet does it ("Garbage collection", image lifecycle): above ``high`` the least recently used
models are evicted until ``low`` is reached. Models that are specified, pinned, or leased by a
running process stay.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import blobs
from clowder_aimage.layout.gc import Collection, Collector
from clowder_aimage.layout.lock import PRIVATE

GRACE = 60.0  # seconds that an unreferenced blob is left for lack of space
STALE = 600.0  # seconds after which an interrupted download is removed then
AGE = 120.0  # seconds after its last use in which a model stays, as in kubelet


class DiskReading(NamedTuple):
    """The usage of a file system, in bytes."""

    total: int
    used: int
    free: int

    @property
    def part(self) -> float:
        """The used part for an ordinary user, as df has it."""
        return self.used / max(1, self.used + self.free)


def usage(root: Path) -> DiskReading:
    """Measure the file system that the store is on, or will be."""
    place = root
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110 - never raises
        place = place.parent
    found = shutil.disk_usage(place)
    return DiskReading(found.total, found.used, found.free)


class StoreUsage(NamedTuple):
    """The bytes in the store."""

    blobs: int = 0
    partial: int = 0


def stored(root: Path) -> StoreUsage:
    """Measure the store."""
    partial = 0
    with contextlib.suppress(OSError), os.scandir(root / PRIVATE / "ingest") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                partial += entry.stat(follow_symlinks=False).st_blocks * 512
    return StoreUsage(sum(found.st_size for _, found in blobs(root)), partial)


@dataclass(slots=True)
class Watermarks:
    """The watermarks of a store's disk, as parts of it.

    ``age``: seconds in which a model stays after its last use. ``measure`` returns the usage.
    """

    high: float = 0.85
    low: float = 0.80
    age: float = AGE
    measure: Callable[[Path], DiskReading] = field(default=usage)

    def excess(self, root: Path) -> int:
        """Return the bytes to evict; 0 below the upper watermark."""
        found = self.measure(root)
        if found.part <= self.high:
            return 0
        return max(0, found.used - int(self.low * (found.used + found.free)))


def relieve(
    store: ImageLayout,
    excess: int,
    keep: Iterable[str],
    *,
    age: float = AGE,
    is_all: bool = False,
) -> Collection:
    """Free ``excess`` bytes.

    Unreferenced blobs go first, then names that are not in ``keep`` and were not used for ``age``
    seconds, the least recently used first. With ``is_all`` no name goes if ``excess`` bytes cannot
    be freed.

    Raises:
        StoreError, VerificationError: nothing could be collected.
    """
    plain = Collector(store, grace=GRACE, stale=STALE).run()
    left = excess - plain.size - plain.partial_size
    if left <= 0:
        return plain
    limit = max(0, plain.left_size - left)
    latest = time.time() - age
    young = (name for name, manifest in store.tags() if store.used(manifest) > latest)
    patterns = [glob.escape(name) for name in (*keep, *(young if age else ()))]
    if is_all:
        would = Collector(store, grace=GRACE, dry_run=True).run(max_size=limit, keep=patterns)
        if would.size < left:
            return plain
    done = Collector(store, grace=GRACE).run(max_size=limit, keep=patterns)
    done.size += plain.size
    done.blobs += plain.blobs
    done.partials += plain.partials
    done.partial_size += plain.partial_size
    return done

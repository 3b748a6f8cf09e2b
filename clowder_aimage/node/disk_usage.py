"""The disk's watermarks, and what goes when the upper one is passed.

As kubelet does it ("Garbage collection", image lifecycle): above ``high`` the least recently used
go until ``low`` is reached. What is wanted, pinned, or held by a running process stays.
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

GRACE = 60.0  # seconds that an unnamed blob is left in when space is short
STALE = 600.0  # seconds after which a download that broke off goes then
AGE = 120.0  # seconds after its last use in which a model stays, as kubelet has it


class DiskReading(NamedTuple):
    """A file system, in bytes."""

    total: int
    used: int
    free: int

    @property
    def part(self) -> float:
        """How full it is for an ordinary user, as df says it."""
        return self.used / max(1, self.used + self.free)


def usage(root: Path) -> DiskReading:
    """Of the file system that the store is on, or will be."""
    place = root
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    found = shutil.disk_usage(place)
    return DiskReading(found.total, found.used, found.free)


@dataclass(frozen=True, slots=True)
class StoredName:
    """Bytes in the store."""

    blobs: int = 0
    partial: int = 0


def stored(root: Path) -> StoredName:
    """What the store takes."""
    partial = 0
    with contextlib.suppress(OSError), os.scandir(root / PRIVATE / "ingest") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                partial += entry.stat(follow_symlinks=False).st_blocks * 512
    return StoredName(sum(found.st_size for _, found in blobs(root)), partial)


@dataclass(slots=True)
class Watermarks:
    """The watermarks of one store, in parts of the disk, and for how many seconds a model stays
    that was just used. ``measure`` says how full it is."""

    high: float = 0.85
    low: float = 0.80
    age: float = AGE
    measure: Callable[[Path], DiskReading] = field(default=usage)

    def excess(self, root: Path) -> int:
        """The bytes that must go; 0 below the upper watermark."""
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
    """Free ``excess`` bytes: by what nothing needs, then by names that are none of ``keep`` and
    were not used for ``age`` seconds, the least recently used first. With ``is_all`` no name goes
    where ``excess`` bytes cannot be had.

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

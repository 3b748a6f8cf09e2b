"""Whether names or blobs have come or gone, told without a look at each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable
from pathlib import Path

from clowder_aimage.layout.lock import PRIVATE

# What changed within so many nanoseconds may change again and look the same: file systems count
# time in steps, some of two seconds, and a server's clock may be another.
_SETTLED = 5 * 10**9
ANEW = 300.0  # seconds, at most, that what was found under a mark counts: see ``mark``
_Stamp = tuple[int, int, int, int, int]


def mark(roots: Iterable[Path]) -> Hashable:
    """What is another one as soon as a name or a blob of these stores has come or gone; None where
    that cannot be told: something changed just now, or cannot be read.

    A blob that is changed in place shows in no directory, and so not here.
    """
    try:
        stamps = [(path, _stamp(path)) for root in roots for path in _places(root)]
    except OSError:
        return None
    newest = max((max(stamp[3:]) for _, stamp in stamps if stamp is not None), default=0)
    return tuple(stamps) if time.time_ns() - newest > _SETTLED else None


def _places(root: Path) -> list[str]:
    """Where a name or a blob that comes or goes is seen."""
    blobs = os.path.join(root, "blobs")
    try:
        algorithms = sorted(os.listdir(blobs))
    except FileNotFoundError:
        algorithms = []
    names = (os.path.join(root, "index.json"), os.path.join(root, PRIVATE, "names"), blobs)
    return [*names, *(os.path.join(blobs, name) for name in algorithms)]


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

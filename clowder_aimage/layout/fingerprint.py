"""The fingerprint of stores: it changes when a name or a blob comes or goes."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable
from pathlib import Path

from clowder_aimage.layout.lock import PRIVATE

# A file that changed within this time may change again and look the same: file systems count time
# in steps of up to two seconds, and a server's clock may differ.
_SETTLED = 5 * 10**9  # nanoseconds
_Stamp = tuple[int, int, int, int, int]


def fingerprint(roots: Iterable[Path]) -> Hashable:
    """Return a value that changes as soon as a name or a blob of these stores comes or goes.

    None where that cannot be known: something changed a moment ago, or cannot be read. A blob that
    is changed in place shows in no directory, and so not here.
    """
    try:
        stamps = [(path, _stamp(path)) for root in roots for path in _watched(root)]
    except OSError:
        return None
    newest = max((max(stamp[3:]) for _, stamp in stamps if stamp is not None), default=0)
    return tuple(stamps) if time.time_ns() - newest > _SETTLED else None


def _watched(root: Path) -> list[str]:
    blobs = os.path.join(root, "blobs")
    algorithms = sorted(os.listdir(blobs)) if os.path.isdir(blobs) else []
    names = (os.path.join(root, "index.json"), os.path.join(root, PRIVATE, "names"), blobs)
    return [*names, *(os.path.join(blobs, name) for name in algorithms)]


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

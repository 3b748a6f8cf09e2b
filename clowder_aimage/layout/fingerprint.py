"""A fingerprint of stores, which changes when a name or a blob is added or removed."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable
from pathlib import Path

from clowder_aimage.layout.lock import PRIVATE
from clowder_aimage.layout.pending_names import list_pending_paths

# A file that changed within this time may change again with the same stamp: file systems have a
# time resolution of up to two seconds, and a server's clock may differ.
_SETTLED = 5 * 10**9  # nanoseconds


def compute_fingerprint(roots: Iterable[Path]) -> Hashable:
    """Return a value that changes when a name or a blob of these stores is added or removed.

    None if that is uncertain: something changed recently, or cannot be read. A blob that is changed
    in place is not detected.
    """
    try:
        stamps = [(path, _read_change(path)) for root in roots for path in _list_watched(root)]
    except OSError:
        return None
    newest = max((max(stamp[3:]) for _, stamp in stamps if stamp is not None), default=0)
    return tuple(stamps) if time.time_ns() - newest > _SETTLED else None


def _list_watched(root: Path) -> list[str]:
    blobs = os.path.join(root, "blobs")
    algorithms = sorted(os.listdir(blobs)) if os.path.isdir(blobs) else []
    names = (os.path.join(root, "index.json"), os.path.join(root, PRIVATE, "names"), blobs)
    paths = (os.path.join(blobs, name) for name in algorithms)
    return [*names, *list_pending_paths(root), *paths]


def _read_change(path: str) -> tuple[int, int, int, int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

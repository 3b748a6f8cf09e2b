"""The stamps of the index.json that aimage wrote last, and of the name records at that time.

While both are current, the index has every recorded name, and no other program has written it: the
records need no comparison with it. The file is removed before a record changes, and written again
after the index.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from clowder_aimage.content.open_directory import unlink
from clowder_aimage.errors import AImageError
from clowder_aimage.layout.lock import PRIVATE, make_directory, open_regular
from clowder_aimage.layout.metadata import write_shared

IndexStamp = tuple[int, int, int, int]
_FILE, _NAMES = "index", "names"
# Bytes of the file
_MAX_SIZE = 1024


def build_stamp(status: os.stat_result) -> IndexStamp:
    """Return a stamp that changes when the file does.

    A file that aimage wrote has a time in nanoseconds, which no later write within the same tick of
    the file system's clock has.
    """
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_current(root: Path, index: IndexStamp) -> bool:
    """Return True if aimage wrote the index with this stamp, and no record changed since."""
    private = os.path.join(root, PRIVATE)
    if os.path.islink(private):
        return False
    with contextlib.suppress(OSError):
        with open(open_regular(os.path.join(private, _FILE)), "rb", buffering=0) as file:
            raw = file.read(_MAX_SIZE) or b""
        return raw == _encode(index, _read_names_stamp(root))
    return False


def write_stamp(root: Path, index: IndexStamp) -> None:
    """Record that the index has every recorded name. Errors are ignored. Hold the store's lock."""
    with contextlib.suppress(OSError, AImageError):
        directory = make_directory(root, PRIVATE)
        data = _encode(index, _read_names_stamp(root))
        write_shared(directory / _FILE, data, durable=False)


def remove_stamp(root: Path) -> None:
    """Remove the file, before a record changes. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        unlink(os.path.join(root, PRIVATE, _FILE))


def _encode(index: IndexStamp, names: IndexStamp | None) -> bytes:
    return json.dumps({"index": index, "names": names}).encode()


def _read_names_stamp(root: Path) -> IndexStamp | None:
    # A power failure may undo the removal of the file, but not with that of a later record.
    try:
        return build_stamp(os.lstat(os.path.join(root, PRIVATE, _NAMES)))
    except FileNotFoundError:
        return None

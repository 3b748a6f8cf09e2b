"""The stamps of the index.json that aimage wrote last, and of the name records at that time.

While both are current, the index has every recorded name, and no other program has written it: the
records need no comparison with it. The file also states whether each name of the index has a record
with its entry. It is removed before a record changes, and written again after the index.
"""

from __future__ import annotations

import contextlib
import json
import os
from enum import Enum, auto
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


class IndexState(Enum):
    """The knowledge of an index."""

    UNKNOWN = auto()
    # aimage wrote it, and no record changed since
    CURRENT = auto()
    # Each name has a record, too, and that its entry
    RECORDED = auto()


def read_state(root: Path, index: IndexStamp) -> IndexState:
    """Return what is known of the index with this stamp."""
    private = os.path.join(root, PRIVATE)
    if os.path.islink(private):
        return IndexState.UNKNOWN
    with contextlib.suppress(OSError):
        with open(open_regular(os.path.join(private, _FILE)), "rb", buffering=0) as file:
            raw = file.read(_MAX_SIZE) or b""
        names = _read_names_stamp(root)
        for state in (IndexState.RECORDED, IndexState.CURRENT):
            if raw == _encode(index, names, state):
                return state
    return IndexState.UNKNOWN


def write_stamp(root: Path, index: IndexStamp, *, is_recorded: bool) -> None:
    """Record that the index has every recorded name. Errors are ignored. Hold the store's lock."""
    with contextlib.suppress(OSError, AImageError):
        directory = make_directory(root, PRIVATE)
        state = IndexState.RECORDED if is_recorded else IndexState.CURRENT
        data = _encode(index, _read_names_stamp(root), state)
        write_shared(directory / _FILE, (data,), durable=False)


def remove_stamp(root: Path) -> None:
    """Remove the file, before a record changes. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        unlink(os.path.join(root, PRIVATE, _FILE))


def _encode(index: IndexStamp, names: IndexStamp | None, state: IndexState) -> bytes:
    is_recorded = state is IndexState.RECORDED
    return json.dumps({"index": index, "names": names, "recorded": is_recorded}).encode()


def _read_names_stamp(root: Path) -> IndexStamp | None:
    # A power failure may undo the removal of the file, but not with that of a later record.
    try:
        return build_stamp(os.lstat(os.path.join(root, PRIVATE, _NAMES)))
    except FileNotFoundError:
        return None

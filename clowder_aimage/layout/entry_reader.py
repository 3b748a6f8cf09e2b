"""The entries of an index for a process that reads it often: after a change, only what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.layout.index import (
    IndexFile,
    parse_index,
    read_index_file,
    read_index_stamp,
)
from clowder_aimage.layout.index_text import find_changes, iter_entries

# Nanoseconds: longer than a tick of the clock of any usual file system
_FRESH = 100_000_000


@dataclass(frozen=True, slots=True)
class EntryChanges:
    """Entries to forget, all of them if it is None, and then entries to add, in order."""

    removed: list[Any] | None
    added: Iterable[Any]


class EntryReader:
    """A reader of the index of the store at ``root``. Calls must not overlap.

    ``check`` raises an error if the store must not be read.
    """

    def __init__(self, root: Path, check: Callable[[], None]) -> None:
        self._root, self._check = root, check
        self._file: IndexFile | None = None
        self._is_settled = False

    def read(self) -> EntryChanges | None:
        """Return the changes since the last call, None without any. Raises StoreError."""
        last = self._file
        if last is not None and self._is_settled and read_index_stamp(self._root) == last.stamp:
            return None
        self._check()
        file = read_index_file(self._root)
        # A file of another tool may be replaced within one tick of the file system's clock
        self._is_settled = file.value is None or (
            file.stamp is not None and abs(time.time_ns() - file.stamp[2]) > _FRESH
        )
        if file.value is None and last is not None and last.value is None:
            changes = EntryChanges(*find_changes(last.raw, file.raw))
        elif file.value is None:
            # One by one: parsed together, they take several times the memory of the text
            changes = EntryChanges(None, iter_entries(file.raw))
        else:
            changes = EntryChanges(None, parse_index(self._root, file)["manifests"])
        self._file = file if file.value is None else IndexFile(b"", file.stamp, {})
        return changes

    def reset(self) -> None:
        """Return all entries with the next call."""
        self._file = None

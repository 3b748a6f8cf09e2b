"""The entries of an index for a process that reads it often: after a change, only what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.layout.index_file import IndexFile, read_index_file, read_index_stamp
from clowder_aimage.layout.index_stamp import IndexStamp, IndexState, read_state
from clowder_aimage.layout.index_text import find_changes
from clowder_aimage.layout.lock import translate_store_errors
from clowder_aimage.layout.pending_names import (
    EntryDifference,
    PendingPosition,
    build_name,
    read_pending,
    read_since,
)

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
        # An index of aimage without a list of changes: its text is compared with that of the next
        # one. A file stays open instead of its text in memory, unless a file of that file system
        # cannot be replaced while it is open.
        self._current: IndexFile | None = None
        # What was read of a list of changes, and whether these are all that the index lacks
        self._position: PendingPosition | None = None
        self._is_exact = False
        # None before the first read
        self._stamp: tuple[IndexStamp | None] | None = None
        self._is_settled = False

    def read(self) -> EntryChanges | None:
        """Return the changes since the last call, None without any. Raises StoreError."""
        stamp, position = read_index_stamp(self._root), self._position
        is_same = self._is_settled and self._stamp == (stamp,)
        if is_same and not self._is_exact and not self._has_grown():
            return None
        if not is_same:
            self._check()
        if stamp is not None and position is not None and self._is_exact:
            changes = self._read_pending(position, stamp)
            if changes is not None:
                return changes if changes.removed or changes.added else None
        return self._read_changes() or self._read_all()

    def _has_grown(self) -> bool:
        if self._position is None:
            return False
        with translate_store_errors(self._root):
            tail = read_pending(self._root, self._position.name, self._position.offset)
        return tail is None or tail.position.offset > 0

    def _read_pending(self, position: PendingPosition, stamp: IndexStamp) -> EntryChanges | None:
        """Return the changes in the lists up to that of an index; None if it has others."""
        with translate_store_errors(self._root):
            found = read_since(self._root, position, build_name(stamp))
        if found is None:
            return None
        changes, self._position = found
        self._stamp, self._is_settled = (stamp,), True
        difference = EntryDifference(changes)
        return EntryChanges(difference.list_removed(), difference.list_added())

    def _read_changes(self) -> EntryChanges | None:
        """Return the changes between two indexes of aimage, None if one of them is not."""
        last = self._current
        if last is None or (current := self._read_current()) is None:
            return None
        # Read again as a whole after an error
        self.reset()
        try:
            with translate_store_errors(self._root):
                removed, added = find_changes(last.text, current.text)
                is_unchanged = last.is_unchanged() and current.is_unchanged()
        except FormatError:
            # Another tool is writing one of them in place
            is_unchanged = False
        if not is_unchanged:
            return None
        self._follow(current)
        difference = EntryDifference()
        difference.apply(removed, added)
        for change in () if current.pending is None else current.pending.iter_changes():
            difference.add(change)
        return EntryChanges(difference.list_removed(), difference.list_added())

    def _read_current(self) -> IndexFile | None:
        stamp = read_index_stamp(self._root)
        if stamp is None or read_state(self._root, stamp) is IndexState.UNKNOWN:
            return None
        file = read_index_file(self._root)
        return file if file.value is None else None

    def _read_all(self) -> EntryChanges:
        self.reset()
        while True:
            file = read_index_file(self._root)
            try:
                with translate_store_errors(self._root):
                    # One by one: parsed together, they take several times the memory
                    entries = file.iter_entries()
                break
            except FormatError:
                if file.is_unchanged():
                    raise
        self._follow(file)
        # A file of another tool may be replaced within one tick of the file system's clock
        self._is_settled = file.value is None or (
            file.stamp is not None and abs(time.time_ns() - file.stamp[2]) > _FRESH
        )
        return EntryChanges(None, entries)

    def _follow(self, file: IndexFile) -> None:
        self._stamp, self._is_settled = (file.stamp,), True
        if (pending := file.pending or file.last) is not None:
            self._position, self._is_exact = pending.position, file.value is None
        elif file.value is None:
            self._current = file

    def reset(self) -> None:
        """Return all entries with the next call."""
        self._current, self._position, self._is_exact = None, None, False
        self._stamp, self._is_settled = None, False

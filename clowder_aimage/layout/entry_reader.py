"""The entries of an index for a process that reads it often: after a change, only what changed."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.content.mount import find_mount
from clowder_aimage.errors import FormatError
from clowder_aimage.layout.index import (
    open_current,
    parse_index,
    read_index_file,
    read_index_stamp,
)
from clowder_aimage.layout.index_stamp import IndexStamp, build_stamp
from clowder_aimage.layout.index_text import FileText, find_changes, iter_entries
from clowder_aimage.layout.lock import translate_store_errors

# Nanoseconds: longer than a tick of the clock of any usual file system
_FRESH = 100_000_000


@dataclass(frozen=True, slots=True)
class EntryChanges:
    """Entries to forget, all of them if it is None, and then entries to add, in order."""

    removed: list[Any] | None
    added: Iterable[Any]


class _CurrentIndex:
    """The text of an index as aimage wrote it, which is compared with that of the next one.

    A file stays open instead of its text in memory, unless a file of that file system cannot be
    replaced while it is open.
    """

    def __init__(self, text: bytes | FileText, stamp: IndexStamp) -> None:
        self.text, self.stamp = text, stamp
        self._finalizer = (
            weakref.finalize(self, os.close, text.fd) if isinstance(text, FileText) else None
        )

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def is_unchanged(self) -> bool:
        """Return True if no other tool has written the file in place, replaced since or not."""
        # Its time of change (ctime) differs once it is replaced
        return isinstance(self.text, bytes) or (
            build_stamp(os.fstat(self.text.fd))[1:3] == self.stamp[1:3]
        )


class EntryReader:
    """A reader of the index of the store at ``root``. Calls must not overlap.

    ``check`` raises an error if the store must not be read.
    """

    def __init__(self, root: Path, check: Callable[[], None]) -> None:
        self._root, self._check = root, check
        self._current: _CurrentIndex | None = None
        # None before the first read
        self._stamp: tuple[IndexStamp | None] | None = None
        self._is_settled = False

    def read(self) -> EntryChanges | None:
        """Return the changes since the last call, None without any. Raises StoreError."""
        if self._is_settled and self._stamp == (read_index_stamp(self._root),):
            return None
        self._check()
        return self._read_changes() or self._read_all()

    def _read_changes(self) -> EntryChanges | None:
        """Return the changes between two indexes of aimage, None if one of them is not."""
        if (last := self._current) is None or (current := self._open_current()) is None:
            return None
        # Read again as a whole after an error
        self._current, self._stamp = None, None
        try:
            with translate_store_errors(self._root):
                removed, added = find_changes(last.text, current.text)
                is_unchanged = last.is_unchanged() and current.is_unchanged()
        except FormatError:
            # Another tool is writing one of them in place
            is_unchanged = False
        finally:
            last.close()
        if not is_unchanged:
            current.close()
            return None
        self._current, self._stamp, self._is_settled = current, (current.stamp,), True
        return EntryChanges(removed, added)

    def _open_current(self) -> _CurrentIndex | None:
        if find_mount(self._root).is_network:
            read = read_index_file(self._root)
            if read.value is not None or read.stamp is None:
                return None
            return _CurrentIndex(read.raw, read.stamp)
        fd = open_current(self._root)
        return None if fd is None else _CurrentIndex(FileText(fd), build_stamp(os.fstat(fd)))

    def _read_all(self) -> EntryChanges:
        self.reset()
        file = read_index_file(self._root)
        self._stamp = (file.stamp,)
        # A file of another tool may be replaced within one tick of the file system's clock
        self._is_settled = file.value is None or (
            file.stamp is not None and abs(time.time_ns() - file.stamp[2]) > _FRESH
        )
        if file.value is not None:
            return EntryChanges(None, parse_index(self._root, file)["manifests"])
        self._current = self._open_current()
        if self._current is not None and self._current.stamp != file.stamp:
            self._current.close()
            self._current = None
        # One by one: parsed together, they take several times the memory of the text
        return EntryChanges(None, iter_entries(file.raw))

    def reset(self) -> None:
        """Return all entries with the next call."""
        if self._current is not None:
            self._current.close()
        self._current, self._stamp, self._is_settled = None, None, False

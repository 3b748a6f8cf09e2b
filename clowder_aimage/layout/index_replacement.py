"""index.json replaced by a new text, and merged with what other programs write meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.errors import AImageError, StoreError
from clowder_aimage.layout.index_file import (
    MAX_INDEX_SIZE,
    IndexFile,
    is_index_locked,
    parse_index,
    read_index_file,
    read_index_stamp,
)
from clowder_aimage.layout.index_merge import merge_theirs
from clowder_aimage.layout.index_stamp import IndexStamp, build_stamp
from clowder_aimage.layout.index_text import encode_index
from clowder_aimage.layout.lock import PRIVATE, make_directory, translate_store_errors
from clowder_aimage.layout.metadata import write_shared
from clowder_aimage.layout.pending_names import (
    PendingNames,
    begin_pending,
    build_name,
    is_large,
    remove_superseded,
)

Build = Callable[[], Iterable[bytes | memoryview]]
"""Returns the text of an index in parts."""


class _ReplacedError(Exception):
    """Another program has written the index since it was read."""


def replace_index(
    root: Path, file: IndexFile, build: Build, *, is_same: bool = False
) -> tuple[IndexStamp | None, bool]:
    """Replace the index that was read, merged with changes by other tools. Hold the lock.

    With ``is_same`` the text has the pending changes of that index, and no others. Return the
    stamp, None if the index is not ours, and True if nothing was merged. Raises StoreError,
    NoSpaceError.
    """
    previous = file.pending or file.last
    new = _NewIndex(root, build, file.stamp, previous, is_same=is_same)
    with contextlib.suppress(_ReplacedError):
        return new.write(), True
    value = parse_index(b"".join(build()), root)
    entries, base = list(value["manifests"]), list(file.read_value()["manifests"])
    while True:
        current = read_index_file(root, is_locked=True)
        theirs = (
            current.read_value()["manifests"] if current.value is None else current.iter_merged()
        )
        merge_theirs(entries, base, theirs := list(theirs))
        base = theirs
        new = _NewIndex(
            root, lambda: (encode_index(value | {"manifests": entries}),), current.stamp, previous
        )
        with contextlib.suppress(_ReplacedError):
            return new.write(), False


@dataclass(slots=True)
class _NewIndex:
    """An index that replaces the one with a stamp, of which ``previous`` has the changes.

    With ``is_same`` it is that one with these changes, and no others.
    """

    root: Path
    build: Build
    stamp: IndexStamp | None
    previous: PendingNames | None
    is_same: bool = False
    _count: int = 0
    _begun: PendingNames | None = None

    def write(self) -> IndexStamp | None:
        """Write it, begin the list of its changes if it is large, and return its stamp.

        Raises _ReplacedError, StoreError, NoSpaceError.
        """
        started = time.monotonic()
        try:
            parts = self._iter_parts()
            stamp = replace_file(self.root, "index.json", parts, on_written=self._begin)
        except BaseException:
            if self._begun is not None:
                self._begun.remove()
            raise
        with contextlib.suppress(OSError, AImageError):
            if self._begun is not None:
                self._begun.confirm(time.monotonic() - started)
            remove_superseded(self.root, self._begun)
        return stamp

    def _iter_parts(self) -> Iterator[bytes | memoryview]:
        # A line before the entries, and two after them
        self._count = -2
        for part in self.build():
            self._count += bytes(part).count(b"\n")
            yield part

    def _begin(self, status: os.stat_result) -> None:
        # Checked as late as possible: another tool's write would be lost.
        if is_large(self._count) and status.st_mtime_ns % 10**6 and is_index_locked(self.root):
            # Without a list the index is written again with each change
            with contextlib.suppress(OSError, AImageError):
                name, previous = build_name(build_stamp(status)), self.previous
                self._begun = begin_pending(
                    self.root, name, self._count, previous, is_same=self.is_same
                )
        if read_index_stamp(self.root) != self.stamp:
            raise _ReplacedError


def replace_file(
    root: Path,
    name: str,
    parts: Iterable[bytes | memoryview],
    *,
    on_written: Callable[[os.stat_result], object] | None = None,
) -> IndexStamp | None:
    """Replace a file of a store, and return its stamp unless another program has replaced it since.

    ``on_written`` is called with its status before it gets its name. Raises StoreError,
    NoSpaceError.
    """
    path, timestamp, size = root / name, time.time_ns(), 0

    def iter_parts() -> Iterator[bytes | memoryview]:
        nonlocal size
        for part in parts:
            size += len(part)
            if size > MAX_INDEX_SIZE:
                raise StoreError(
                    f"{path} would have more than {size} bytes, the limit is {MAX_INDEX_SIZE}",
                    hint="remove names that are no longer needed",
                )
            yield part

    with translate_store_errors(root):
        private = make_directory(root, PRIVATE)
        write_shared(
            path, iter_parts(), directory=private, time_ns=timestamp, on_written=on_written
        )
        status = os.stat(path)
    is_ours = status.st_mtime_ns == timestamp and status.st_size == size
    return build_stamp(status) if is_ours else None

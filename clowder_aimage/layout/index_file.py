"""index.json as it is read, with what it lacks.

While the index is the one that aimage wrote last (index_stamp.py), it has all recorded names, and
single entries are found in its text (index_text.py). One of another program is parsed, in parts,
and compared with the records (name_record.py) and with the lists of changes (index_merge.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from clowder_aimage.content.file_system import is_file_locked, read_again
from clowder_aimage.content.mount import find_mount
from clowder_aimage.content.open_directory import READ
from clowder_aimage.document.long_list import LongList, read_long_list
from clowder_aimage.errors import FormatError, StoreError
from clowder_aimage.layout.index_merge import EntryScan, drop_replaced, find_moved, merge_left
from clowder_aimage.layout.index_stamp import IndexStamp, IndexState, build_stamp, read_state
from clowder_aimage.layout.index_text import (
    FileText,
    Text,
    exchange_lines,
    find_lines,
    iter_entries,
)
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_version,
    read_settled,
    translate_store_errors,
)
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.layout.name_record import RecordedEntries
from clowder_aimage.layout.pending_names import (
    EntryDifference,
    NameChange,
    PendingNames,
    build_name,
    read_left,
    read_pending,
)
from clowder_aimage.oci import mediatype

# The lock of the index and of the records of names
LOCK = "lock"
MAX_INDEX_SIZE = 64 * 1024 * 1024
_HINT = "another program wrote it; move it away to start with an empty index"
# Bytes of an index that is read at once
_MAX_WHOLE = 1024 * 1024
# Seconds between two looks whether a change is complete, and their number
_MOMENT, _MAX_WAITS = 0.01, 30
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IndexFile:
    """An index as it was read.

    A missing one has no stamp. ``value`` has the changes of its own list; the value of one that
    aimage wrote last is None, since it is not parsed; with ``is_recorded`` each of its names has a
    record. ``pending`` has the changes since it was written, ``lacking`` those that another
    program's index lacks, ``last`` the file of these, and ``moved`` the names that skopeo moved.
    Methods raise OSError, and FormatError if another program has written the file in place.
    """

    root: Path
    text: Text
    stamp: IndexStamp | None
    value: dict[str, Any] | None
    pending: PendingNames | None = None
    last: PendingNames | None = None
    lacking: Collection[NameChange] = ()
    moved: Collection[str] = ()
    is_recorded: bool = False

    def read_value(self) -> dict[str, Any]:
        """Return the value of the file alone."""
        raw = self.text[:]
        self.check_unchanged()
        return parse_index(raw, self.root) if raw else build_empty()

    def read_view(self) -> bytes:
        """Return the text with the pending changes."""
        raw = b"".join(self.iter_view())
        self.check_unchanged()
        return raw

    def iter_view(self) -> Iterator[bytes]:
        """Yield the text with the pending changes in parts. Call ``check_unchanged`` afterwards."""
        changes = self._read_changes()
        if not changes:
            return iter((self.text[:],))
        return exchange_lines(self.text, changes.removed, changes.list_added_texts())

    def _read_changes(self) -> EntryDifference:
        return EntryDifference(() if self.pending is None else self.pending.iter_changes())

    def iter_merged(self, changed: set[Any] | None = None) -> Iterator[Any]:
        """Yield the entries of ``value`` with the changes that they lack.

        The keys of names whose entries differ are added to ``changed``.
        """
        theirs = drop_replaced(self.value["manifests"] if self.value else (), self.moved)
        return merge_left(theirs, self.lacking, changed)

    def iter_entries(self) -> Iterator[Any]:
        """Yield all entries, with the changes and the recorded names that they lack."""
        if self.value is None:
            raw, changes = self.text[:], self._read_changes()
            self.check_unchanged()
            return iter_entries(raw, changes.removed, changes.list_added_texts())
        return iter(RecordedEntries(self.root, self.iter_merged()))

    def find(self, texts: Collection[str], *, is_digest: bool = False) -> Iterable[Any]:
        """Return the entries with one of these names, or digests, as a string, and perhaps others.

        ``texts`` are all spellings of a name.
        """
        if self.value is not None:
            return self.iter_entries()
        if self.is_recorded and self.pending is not None and not is_digest:
            records = map(MetadataFiles(self.root, "names").get, sorted(texts))
            return [record.get("entry") for record in records if record is not None]
        entries = [line.entry for line in find_lines(self.text, texts)]
        self.check_unchanged()
        changes = EntryDifference() if self.pending is None else self.pending.find(texts)
        for removed in changes.list_removed():
            if removed in entries:
                entries.remove(removed)
        return entries + changes.list_added()

    def is_unchanged(self) -> bool:
        """Return True if no other program has written the file in place, replaced since or not."""
        # Its time of change (ctime) differs once it is replaced
        return (
            self.stamp is None
            or not isinstance(self.text, FileText)
            or (build_stamp(os.fstat(self.text.fd))[1:3] == self.stamp[1:3])
        )

    def check_unchanged(self) -> None:
        """Raise FormatError if another program has written the file in place."""
        if not self.is_unchanged():
            raise FormatError("another program is writing index.json", hint="try again")


def read_index(root: Path) -> dict[str, Any]:
    """Return the parsed index with the recorded names; an empty one without a store.

    Raises StoreError: it cannot be read, is not an index, or too large.
    """

    def read(file: IndexFile) -> dict[str, Any]:
        if file.value is not None:
            return file.value | {"manifests": list(file.iter_entries())}
        value = parse_index(file.read_view(), root)
        return value | {"manifests": list(value["manifests"])}

    return read_consistently(root, read)


def iter_index(root: Path) -> Iterator[Any]:
    """Return an iterator, which parses a few entries together. Raises as ``read_index``."""
    return read_consistently(root, IndexFile.iter_entries)


def find_entries(root: Path, texts: Collection[str], *, is_digest: bool) -> Iterable[Any]:
    """Return the entries with one of these names, or digests, and perhaps others, in order.

    ``texts`` are all spellings of a name. Raises as ``read_index`` does.
    """
    return read_consistently(root, lambda file: file.find(texts, is_digest=is_digest))


def read_consistently(root: Path, read: Callable[[IndexFile], T], *, is_locked: bool = False) -> T:
    """Read an index, and again if another program writes it in place meanwhile."""
    while True:
        file = read_index_file(root, is_locked=is_locked)
        try:
            with translate_store_errors(root):
                return read(file)
        except FormatError as error:
            if file.is_unchanged():
                raise StoreError(error.message, **error.advice) from None


def read_index_file(root: Path, *, is_locked: bool = False) -> IndexFile:
    """Return the file, with its value unless aimage wrote it last. Raises as ``read_index``.

    ``is_locked`` states that the caller holds the lock of the index.
    """
    path = root / "index.json"
    check_version(root)
    with translate_store_errors(root):
        try:
            read = functools.partial(_read_file, root, path, is_locked=is_locked)
            return read_settled(read, path, FormatError)
        except FormatError as error:
            # The store is at fault, not the requested content.
            raise StoreError(error.message, **error.advice) from None
        except FileNotFoundError:
            if root.exists() and not root.is_dir():
                raise NotADirectoryError(20, "Not a directory", str(root)) from None
        files = read_left(root)
        lacking = EntryScan(files).find_lacking(time.time_ns())
        return IndexFile(root, b"", None, build_empty(), None, next(iter(files), None), lacking)


def build_empty() -> dict[str, Any]:
    """Return an index without entries."""
    return {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": list[Any]()}


def _read_file(root: Path, path: Path, *, is_locked: bool) -> IndexFile:
    for _ in range(_MAX_WAITS):
        text = FileText(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        status = os.fstat(text.fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file", hint=_HINT)
        if status.st_size > MAX_INDEX_SIZE:
            size = f"{status.st_size} bytes, the limit is {MAX_INDEX_SIZE}"
            raise FormatError(f"{path} is too large: {size}", hint=_HINT)
        stamp = build_stamp(status)
        # A file of another host may disappear while it is open, and a small one is needed whole
        is_whole = status.st_size <= _MAX_WHOLE or find_mount(root).is_network
        pending = read_pending(root, build_name(stamp))
        # Another tool may write in place since its status was read
        state = read_state(root, stamp)
        if state is not IndexState.UNKNOWN and build_stamp(os.fstat(text.fd)) == stamp:
            content = text[:] if is_whole else text
            if is_whole and build_stamp(os.fstat(text.fd))[1:3] != stamp[1:3]:
                continue
            is_recorded = state is IndexState.RECORDED
            return IndexFile(root, content, stamp, None, pending, is_recorded=is_recorded)
        if pending is None:
            # That of an index that was replaced since may be removed
            is_settled = read_index_stamp(root) == stamp
        else:
            # Another process may be about to append a change that it has recorded
            is_settled = is_locked or not is_index_locked(root)
        if is_settled:
            break
        time.sleep(_MOMENT)
    if pending is not None:
        # One of aimage, of which a record has changed since
        file = IndexFile(root, text[:] if is_whole else text, stamp, None, pending)
        return replace(file, value=parse_index(file.read_view(), root))
    raw, files = text[:], read_left(root)
    scan = EntryScan(files)
    value = parse_index(raw, root, scan.visit)
    lacking = scan.find_lacking(status.st_mtime_ns)
    last = next(iter(files), None)
    moved = find_moved(value["manifests"], scan.left)
    return IndexFile(root, raw, stamp, value, None, last, lacking, moved)


def parse_index(
    raw: bytes, root: Path, visit: Callable[[list[Any]], object] = lambda _: None
) -> dict[str, Any]:
    """Return an index, whose entries are parsed when they are iterated. Raises FormatError.

    ``visit`` is called with the entries, perhaps in parts.
    """
    path = root / "index.json"
    broken = f"{path} is not an OCI index"
    try:
        value = read_long_list(raw, str(path), MAX_INDEX_SIZE, "manifests", visit)
    except FormatError as error:
        raise FormatError(f"{broken}: {error.message}", hint=_HINT) from None
    if isinstance(value, dict) and value.get("manifests", 0) is None:
        # Go writes an empty list as null.
        value["manifests"] = []
    if not isinstance(value, dict) or not isinstance(value.get("manifests"), list | LongList):
        raise FormatError(broken, hint=_HINT)
    return value


def is_index_locked(root: Path) -> bool:
    """Return True if the lock of the index is held, and excludes other processes.

    Where locks have no effect, another process may be writing an index without the last record.
    """
    with contextlib.suppress(OSError):
        return is_file_locked(root / PRIVATE / LOCK, READ)
    return False


def read_index_stamp(root: Path) -> IndexStamp | None:
    """Return the stamp of the index, None without one. Raises StoreError."""
    path = root / "index.json"
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
        status = os.stat(path)
        if _is_network(root, status.st_dev):
            # Another host may have replaced it: an open asks its server, a status need not
            status = read_again(functools.partial(_stat_opened, path))
        return build_stamp(status)
    return None


def _stat_opened(path: Path) -> os.stat_result:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


@functools.lru_cache(maxsize=64)
def _is_network(root: Path, device: int) -> bool:  # noqa: ARG001 - another one may be mounted there
    return find_mount(root).is_network

"""The changes of names that are not in index.json yet.

A large index is not written for each change (index.py). Its changes are appended to a file in
``.aimage/pending`` that is named by the inode, the size and the time of the index: whoever reads an
index finds all changes since it was written, and none before. A new index begins a new file, which
refers to the one before. Each line has a checksum; a line that a killed process has not completed
is ignored. Append, and begin files, only under the lock of the index, and where it has an effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.file_system import read_again, sync_file
from clowder_aimage.content.open_directory import unlink
from clowder_aimage.errors import FormatError
from clowder_aimage.layout.index_stamp import IndexStamp
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    make_directory,
    open_regular,
    open_shared,
)
from clowder_aimage.layout.metadata import write_shared
from clowder_aimage.oci import read_json

_DIRECTORY, _INDEX = "pending", "index.json"
_NAME = re.compile(r"\d+-\d+-\d+")
# Entries up to which an index is written with every change, and has no list
SMALL = 1000
# Bytes of the changes after which the index is written in any case
MAX_SIZE = 2 * 1024 * 1024
# Bytes of the changes of a call; larger ones are written to the index
_MAX_CHANGE = 1024 * 1024
_MAX_READ = 2 * (MAX_SIZE + _MAX_CHANGE)
# Files that are kept for processes that have read an earlier index
_KEPT = 32
# By their paths, the files of which only the first bytes are read
_untrusted: dict[str, int] = {}
_WRITE = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class NameChange:
    """The entry of a name before and after a change; None without one."""

    name: str
    old: Any
    new: Any

    @classmethod
    def parse(cls, value: Any) -> NameChange | None:
        """Return the change of a JSON value, None if it is not one."""
        if isinstance(value, dict) and isinstance(name := value.get("name"), str):
            return cls(name, value.get("old"), value.get("new"))
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the change as a JSON value."""
        return {"name": self.name, "old": self.old, "new": self.new}

    def has_text(self, texts: Collection[bytes]) -> bool:
        """Return True if one of these JSON strings is in it."""
        own = encode_entry(self.to_json())
        return any(text in own for text in texts)

    @property
    def growth(self) -> int:
        """The number of entries that it adds, -1 for one that it removes."""
        return (self.new is not None) - (self.old is not None)


@dataclass(frozen=True, slots=True)
class PendingPosition:
    """The file of an index, and the bytes of it that were read."""

    name: str
    offset: int


class EntryDifference:
    """The net effect of changes: entries that are no longer in an index, and those that are new.

    Entries are texts, as they are in the index.
    """

    def __init__(self, changes: Iterable[NameChange] = ()) -> None:
        self.removed, self.added = Counter[bytes](), dict[bytes, int]()
        for change in changes:
            self.add(change)

    def add(self, change: NameChange) -> None:
        """Apply a later change of a name."""
        self.apply(
            () if change.old is None else (change.old,),
            () if change.new is None else (change.new,),
        )

    def apply(self, removed: Iterable[Any], added: Iterable[Any]) -> None:
        """Apply a later change of entries."""
        for text in map(encode_entry, removed):
            if text not in self.added:
                self.removed[text] += 1
            elif self.added[text] > 1:
                self.added[text] -= 1
            else:
                del self.added[text]
        for text in map(encode_entry, added):
            if self.removed[text] > 0:
                self.removed[text] -= 1
            else:
                self.added[text] = self.added.get(text, 0) + 1
            if not self.removed[text]:
                del self.removed[text]

    def list_removed(self) -> list[Any]:
        """Return the entries that are no longer in the index."""
        return [read_json(text, _INDEX) for text in self.removed.elements()]

    def list_added(self) -> list[Any]:
        """Return the entries that are new, in order."""
        return [read_json(text, _INDEX) for text in self.list_added_texts()]

    def list_added_texts(self) -> list[bytes]:
        """Return the texts of the entries that are new, in order."""
        return [text for text, count in self.added.items() for _ in range(count)]

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)


def encode_entry(entry: Any) -> bytes:
    """Return the text of an entry, which is that of its line in the index."""
    return json.dumps(entry).encode()


class PendingNames:
    """The changes since the index of this file was written, from an offset of the file."""

    def __init__(self, root: Path, name: str, raw: bytes) -> None:
        self._root, self.name, self._raw = root, name, raw

    @property
    def position(self) -> PendingPosition:
        """The end of the changes that were read."""
        return PendingPosition(self.name, self._raw.rfind(b"\n") + 1)

    @property
    def time_ns(self) -> int:
        """The time of the index in nanoseconds."""
        return int(self.name.rpartition("-")[2])

    @property
    def previous(self) -> tuple[str, int | None] | None:
        """The file of the index that this one has replaced.

        The number is the end of the changes that it has; None if it has further ones.
        """
        head = _parse_line(self._raw[: self._raw.find(b"\n") + 1])
        name, size = head.get("after"), head.get("size")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            return None
        return name, size if isinstance(size, int) else None

    @property
    def is_begun(self) -> bool:
        """True if it is certain that this index was written."""
        return any(value.keys() & {"seconds", "changes"} for value in self._iter_values(b""))

    @property
    def seconds(self) -> float:
        """The time that writing this index took; 0 if that is unknown."""
        values = (value.get("seconds") for value in self._iter_values(b'"seconds"'))
        return next((float(value) for value in values if isinstance(value, int | float)), 0.0)

    @property
    def count(self) -> int:
        """The number of entries of the index with the changes; 0 if that is unknown."""
        end = self._raw.rfind(b"\n")
        while end > 0:
            start = self._raw.rfind(b"\n", 0, end) + 1
            if isinstance(count := _parse_line(self._raw[start : end + 1]).get("count"), int):
                return count
            end = start - 1
        return 0

    @property
    def is_changed(self) -> bool:
        """True if there is a change."""
        return next(self.iter_changes(), None) is not None

    @property
    def is_full(self) -> bool:
        """True if the index is to be written before the next change."""
        return len(self._raw) > MAX_SIZE

    def iter_changes(self, texts: Collection[bytes] = ()) -> Iterator[NameChange]:
        """Yield the changes, in order; with ``texts`` only those with one of these JSON strings."""
        for value in self._iter_values(b'"changes"', texts):
            changes = value.get("changes")
            for item in changes if isinstance(changes, list) else ():
                change = NameChange.parse(item)
                if change is not None and (not texts or change.has_text(texts)):
                    yield change

    def find(self, texts: Collection[str]) -> EntryDifference:
        """Return what changed of the entries that have one of these texts as a string."""
        encoded = [encode_entry(text) for text in texts]
        if not any(text in self._raw for text in encoded):
            return EntryDifference()
        return EntryDifference(self.iter_changes(encoded))

    def _iter_values(self, key: bytes, texts: Collection[bytes] = ()) -> Iterator[dict[str, Any]]:
        for line in self._raw.splitlines(keepends=True):
            if key in line and (not texts or any(text in line for text in texts)):
                yield _parse_line(line)

    def accepts(self, changes: Collection[NameChange], index_size: int, limit: int) -> bool:
        """Return True if the changes can be appended, and the index then is below ``limit``."""
        size = sum(len(encode_entry(change.to_json())) for change in changes)
        return size <= _MAX_CHANGE and index_size + len(self._raw) + size <= limit

    def append(self, changes: Collection[NameChange]) -> None:
        """Append changes, durably. Raises OSError."""
        items = [change.to_json() for change in changes]
        count = self.count + sum(change.growth for change in changes)
        self._append({"count": count, "changes": items}, is_durable=True)

    def confirm(self, seconds: float) -> None:
        """Record that the index was written, and how long that took. Raises OSError."""
        self._append({"seconds": seconds}, is_durable=False)

    def _append(self, value: dict[str, Any], *, is_durable: bool) -> None:
        path = os.path.join(self._root, PRIVATE, _DIRECTORY, self.name)
        # The line that a killed process has not completed ends here
        start = b"" if self._raw.endswith(b"\n") else b"\n"
        data = start + _encode_line(value)
        fd = open_shared(path, _WRITE)
        try:
            size = os.fstat(fd).st_size
            try:
                write_all(fd, data)
                if is_durable:
                    sync_file(fd, path, data_only=True)
            except BaseException:
                if is_durable:
                    # An interrupted change is not made, either
                    _take_back(fd, size, path)
                raise
        finally:
            os.close(fd)
        self._raw += data

    def remove(self) -> None:
        """Remove the file; ignore errors."""
        path = os.path.join(self._root, PRIVATE, _DIRECTORY, self.name)
        with contextlib.suppress(OSError):
            unlink(path)
            _untrusted.pop(path, None)


def is_large(count: int) -> bool:
    """Return True if an index of that many entries has a list of changes."""
    return count > SMALL


def build_name(stamp: IndexStamp) -> str:
    """Return the name of the file of an index."""
    inode, size, mtime, _ = stamp
    return f"{inode}-{size}-{mtime}"


def begin_pending(
    root: Path, name: str, count: int, previous: PendingNames | None, *, is_same: bool
) -> PendingNames:
    """Create the file of an index, before that gets its name. Raises OSError, AImageError.

    Args:
        root: The root of the store.
        name: The name of the file.
        count: The number of entries of the index.
        previous: The file of the index that is replaced.
        is_same: The new index is the previous one with its changes, and no others.
    """
    head: dict[str, Any] = {"count": count}
    if previous is not None:
        head |= {"after": previous.name, "size": previous.position.offset if is_same else None}
    raw = _encode_line(head)
    write_shared(make_directory(root, PRIVATE, _DIRECTORY) / name, (raw,))
    return PendingNames(root, name, raw)


def remove_superseded(root: Path, current: PendingNames | None) -> None:
    """Remove the files of earlier indexes, except the last ones before the current one."""
    kept, following = set[str](), current
    while following is not None and following.name not in kept and len(kept) < _KEPT:
        kept.add(following.name)
        name, _ = following.previous or ("", None)
        following = read_pending(root, name) if name else None
    for name in _list_names(root) - kept:
        PendingNames(root, name, b"").remove()


def has_pending(root: Path, name: str) -> bool:
    """Return True if there is a file of that name; nothing is opened."""
    return os.path.lexists(os.path.join(root, PRIVATE, _DIRECTORY, name))


def read_pending(root: Path, name: str, start: int = 0) -> PendingNames | None:
    """Return the file of that name; None without one, and if it ends before ``start``.

    Raises OSError, StoreError.
    """
    path = os.path.join(check_own(root, _DIRECTORY), name)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        raw = read_again(lambda: _read_file(path, start))
        return None if raw is None else PendingNames(root, name, raw)
    return None


def read_left(root: Path) -> list[PendingNames]:
    """Return the files from the last one back. Raises OSError, StoreError."""
    files = {name: file for name in _list_names(root) if (file := read_pending(root, name))}
    previous = {file.previous[0] for file in files.values() if file.previous is not None}
    ends = [file for name, file in files.items() if name not in previous]
    file, chain = max(ends, key=lambda end: end.time_ns, default=None), list[PendingNames]()
    while file is not None:
        chain.append(file)
        name, _ = file.previous or ("", None)
        # Each file is visited once
        file = files.pop(name, None)
    return chain


def read_since(
    root: Path, position: PendingPosition, name: str
) -> tuple[list[NameChange], PendingPosition] | None:
    """Return the changes from a position to the end of the file ``name``, and that end.

    None if the files in between are missing. Raises OSError, StoreError.
    """
    files, wanted = list[PendingNames](), name
    while wanted != position.name:
        file = read_pending(root, wanted)
        before, size = (file and file.previous) or ("", None)
        if file is None or size is None or len(files) > _KEPT:
            return None
        files.append(file)
        wanted = before
    tail = read_pending(root, position.name, position.offset)
    if tail is None:
        return None
    changes = [change for file in (tail, *reversed(files)) for change in file.iter_changes()]
    end = PendingPosition(name, position.offset + tail.position.offset)
    return changes, files[0].position if files else end


def _read_file(path: str, start: int) -> bytes | None:
    """Return the bytes from an offset; None if the file ends before it, for a line taken back."""
    fd = open_regular(path)
    try:
        size = min(os.fstat(fd).st_size, _untrusted.get(path, _MAX_READ))
        return os.pread(fd, size - start, start) if size >= start else None
    finally:
        os.close(fd)


def _take_back(fd: int, size: int, path: str) -> None:
    """Remove a line that may not be on the disk; ignore errors.

    If that fails, this process does not read the line. Nothing is appended here afterwards: the
    stamp of the index is missing, so the next change writes that.
    """
    _untrusted[path] = size
    with contextlib.suppress(OSError):
        os.ftruncate(fd, size)
        del _untrusted[path]
        sync_file(fd, path)


def _list_names(root: Path) -> set[str]:
    directory = check_own(root, _DIRECTORY)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return {name for name in os.listdir(directory) if _NAME.fullmatch(name)}
    return set()


def list_pending_paths(root: Path) -> list[str]:
    """Return the paths of all files. Raises OSError, StoreError."""
    return [os.path.join(root, PRIVATE, _DIRECTORY, name) for name in sorted(_list_names(root))]


def _encode_line(value: dict[str, Any]) -> bytes:
    text = json.dumps(value).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the value of a line; an empty one if the line is not complete."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if line.endswith(b"\n") and checksum == b"%08x" % zlib.crc32(text):
        with contextlib.suppress(FormatError):
            value = read_json(text, _DIRECTORY)
            return value if isinstance(value, dict) else {}
    return {}

"""index.json: merged and replaced under an interprocess lock.

Other tools do not lock, and may overwrite changes. Every name that aimage sets is first recorded
in a separate file (``.aimage/names``). A name that is missing from the index is read from there,
and restored by the next write. While the index is the one that aimage wrote last (index_stamp.py),
it has all recorded names, and single entries are found in its text (index_text.py).

An index of more than ``SMALL`` entries is written seldom: until then, changes are in a list
(pending_names.py), and reads apply it. If another program writes the index meanwhile, its entry of
a name counts if it is neither the one before our change nor ours.

The fingerprint changes when a name or a blob is added or removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.file_system import is_file_locked
from clowder_aimage.content.mount import find_mount
from clowder_aimage.content.open_directory import READ
from clowder_aimage.content.store import LAYOUT_FILE
from clowder_aimage.errors import AImageError, FormatError, StoreError, UsageError
from clowder_aimage.layout.entry_name import build_key, get_name, is_named, list_spellings
from clowder_aimage.layout.index_merge import drop_replaced, find_lacking, merge_left, merge_theirs
from clowder_aimage.layout.index_stamp import (
    IndexStamp,
    IndexState,
    build_stamp,
    read_state,
    remove_stamp,
    write_stamp,
)
from clowder_aimage.layout.index_text import (
    FileText,
    Text,
    encode_index,
    exchange_lines,
    find_lines,
    iter_entries,
    replace_lines,
)
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_version,
    hold_lock,
    make_directory,
    read_settled,
    translate_store_errors,
)
from clowder_aimage.layout.metadata import MetadataFiles, build_file_name, write_shared
from clowder_aimage.layout.pending_names import (
    EntryDifference,
    NameChange,
    PendingNames,
    begin_pending,
    build_name,
    encode_entry,
    has_pending,
    list_pending_paths,
    read_left,
    read_pending,
    remove_superseded,
)
from clowder_aimage.oci import Digest, mediatype, read_json

_LOCK = "lock"
MAX_INDEX_SIZE = 64 * 1024 * 1024
_HINT = "another program wrote it; move it away to start with an empty index"
# A file that changed within this time may change again with the same stamp: file systems have a
# time resolution of up to two seconds, and a server's clock may differ.
_SETTLED = 5 * 10**9  # nanoseconds


# Names that are edited without parsing the other entries
_MAX_SINGLE = 16
# Bytes of an index that is read at once
_MAX_WHOLE = 1024 * 1024
# Entries up to which an index is written with every change
SMALL = 1000
# Seconds, and times of the last duration, after which a large index is written again
_MIN_INTERVAL, _MAX_SHARE = 1.0, 20
# Seconds between two looks whether a change is complete, and their number
_MOMENT, _MAX_WAITS = 0.01, 30
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IndexFile:
    """An index as it was read.

    A missing one has no stamp. ``value`` is that of the file alone. One that aimage wrote last has
    none, since it is not parsed; with ``is_recorded`` each of its names has a record. ``pending``
    has the changes since it was written, ``left`` those that it lacks, and ``last`` the file of
    these, if another program wrote it. Methods raise OSError, and FormatError if another program
    has written the file in place.
    """

    root: Path
    text: Text
    stamp: IndexStamp | None
    value: dict[str, Any] | None
    pending: PendingNames | None = None
    last: PendingNames | None = None
    left: Sequence[NameChange] = ()
    is_recorded: bool = False

    def read_text(self) -> bytes:
        """Return the text of the file."""
        raw = self.text[:]
        self.check_unchanged()
        return raw

    def read_view(self) -> bytes:
        """Return the text with the pending changes."""
        raw = b"".join(self.iter_view())
        self.check_unchanged()
        return raw

    def iter_view(self) -> Iterator[bytes]:
        """Yield the text with the pending changes in parts. Call ``check_unchanged`` afterwards."""
        changes = EntryDifference(self.pending.iter_changes() if self.pending is not None else ())
        if not changes:
            return iter((self.text[:],))
        return exchange_lines(self.text, changes.removed, changes.list_added_texts())

    def find(self, texts: Collection[str], *, is_digest: bool = False) -> list[Any]:
        """Return the entries with one of these names, or digests, as a string, and perhaps others.

        ``texts`` are all spellings of a name.
        """
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
    return _read_consistently(root, functools.partial(parse_index, root))


def iter_index(root: Path) -> Iterator[Any]:
    """Return an iterator, which parses a few entries together. Raises as ``read_index``."""

    def begin(file: IndexFile) -> Iterator[Any]:
        if file.value is None:
            return iter_entries(file.read_view())
        return iter(parse_index(root, file)["manifests"])

    return _read_consistently(root, begin)


def find_entries(root: Path, texts: Collection[str], *, is_digest: bool) -> list[Any]:
    """Return the entries with one of these names, or digests, and perhaps others, in order.

    ``texts`` are all spellings of a name. Raises as ``read_index`` does.
    """

    def find(file: IndexFile) -> list[Any]:
        if file.value is None:
            return file.find(texts, is_digest=is_digest)
        entries: list[Any] = parse_index(root, file)["manifests"]
        return entries

    return _read_consistently(root, find)


def _read_consistently(root: Path, read: Callable[[IndexFile], T], *, is_locked: bool = False) -> T:
    """Read an index, and again if another program writes it in place meanwhile."""
    while True:
        file = read_index_file(root, is_locked=is_locked)
        try:
            with translate_store_errors(root):
                return read(file)
        except FormatError as error:
            if file.is_unchanged():
                raise StoreError(error.message, **error.advice) from None


def parse_index(root: Path, file: IndexFile) -> dict[str, Any]:
    """Return the value of the file with the pending changes and the recorded names.

    Raises FormatError: another program has written it since.
    """
    if file.value is None:
        return _parse(file.read_view(), root / "index.json")
    return _restore_names(root, _apply_changes(root, file, file.value))[0]


def _apply_changes(root: Path, file: IndexFile, value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the value of a file that is compared with the records, with the changes."""
    if file.pending is not None and file.pending.is_changed:
        return _parse(file.read_view(), root / "index.json")
    return value | {"manifests": merge_left(value["manifests"], file.left)}


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
        value = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": list[Any]()}
        files = read_left(root)
        left = find_lacking([], files, time.time_ns())
        return IndexFile(root, b"", None, value, None, next(iter(files), None), left)


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
        pending = read_pending(root, build_name(stamp))
        # Another tool may write in place since its status was read
        state = read_state(root, stamp)
        if state is not IndexState.UNKNOWN and build_stamp(os.fstat(text.fd)) == stamp:
            # A file of another host may disappear while it is open, and a small one is needed whole
            is_whole = status.st_size <= _MAX_WHOLE or find_mount(root).is_network
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
            is_settled = is_locked or not _is_locked(root)
        if is_settled:
            break
        time.sleep(_MOMENT)
    raw = text[:]
    value = _parse(raw, path)
    value["manifests"] = drop_replaced(value["manifests"])
    if pending is not None:
        return IndexFile(root, raw, stamp, value, pending)
    files = read_left(root)
    left = find_lacking(value["manifests"], files, status.st_mtime_ns)
    return IndexFile(root, raw, stamp, value, None, next(iter(files), None), left)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    broken = f"{path} is not an OCI index"
    try:
        value = read_json(raw, str(path), MAX_INDEX_SIZE)
    except FormatError as error:
        raise FormatError(f"{broken}: {error.message}", hint=_HINT) from None
    if isinstance(value, dict) and value.get("manifests", 0) is None:
        # Go writes an empty list as null.
        value["manifests"] = []
    if not isinstance(value, dict) or not isinstance(value.get("manifests"), list):
        raise FormatError(broken, hint=_HINT)
    return value


def _restore_names(root: Path, value: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Restore recorded names that another tool has dropped, and return ``value``.

    The second value is True if none is left that may be restored later.
    """
    records, is_complete = MetadataFiles(root, "names"), True
    ours = records.list_names()
    if ours:
        ours -= {build_file_name(get_name(entry)) for entry in value["manifests"]}
    for name in sorted(ours):
        record = records.read(name)
        if record is None or not isinstance(entry := record.get("entry"), dict):
            continue
        # An entry of a read-only store, or one whose manifest is still stored.
        if record.get("elsewhere") or _is_here(root, entry):
            value["manifests"].append(entry)
        else:
            is_complete = False
    return value, is_complete


def _record_moves(root: Path, entries: list[Any]) -> bool:
    """Record names that another tool has moved, so that their old targets are not restored.

    Return True if each entry has a name, and a record that has the entry.
    """
    records, is_recorded = MetadataFiles(root, "names"), True
    ours = records.list_names()
    for entry in entries:
        name = get_name(entry)
        # Of two entries with one name, the first counts.
        if not name or build_file_name(name) not in ours:
            is_recorded = False
            continue
        ours.discard(build_file_name(name))
        recorded = (records.get(name) or {}).get("entry")
        if isinstance(recorded, dict) and recorded.get("digest") != entry.get("digest"):
            records.put(name, {"entry": entry}, durable=True)
        elif encode_entry(recorded) != encode_entry(entry):
            # Also if only the order of its fields differs: the list compares texts
            is_recorded = False
    return is_recorded


def _are_recorded(root: Path, changes: Iterable[NameChange]) -> bool:
    """Return True if the names of the changes have records that have the entries, and no others."""
    records = MetadataFiles(root, "names")
    for change in changes:
        found = [records.get(text) for text in list_spellings(change.name)]
        entries = [record.get("entry") for record in found if record is not None]
        if entries != [change.new] * (change.new is not None):
            return False
    return True


def _is_here(root: Path, entry: Any) -> bool:
    try:
        digest = Digest.parse(entry["digest"])
        path = os.path.join(root, "blobs", digest.algorithm, digest.encoded)
        return bool(os.stat(path).st_size == entry["size"])
    except (FormatError, UsageError, KeyError, TypeError, OSError):
        return False


@contextlib.contextmanager
def edit_index(
    root: Path,
    names: Collection[str] | None = None,
    *,
    is_deferred: bool = False,
    undo: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Yield the index for changes in place, and write it or its list when the block ends.

    With ``names`` it may have only the entries of these names. Entries are replaced, and not
    changed. Unknown fields and entries are kept. Concurrent changes by other tools are merged. With
    ``is_deferred`` the caller calls ``write_pending`` later, for a large index. ``undo`` is called
    under the lock if the block or the write fails.
    """
    with hold_lock(root, _LOCK), _undoing(undo):
        if not (root / "oci-layout").exists():
            _replace(root, "oci-layout", (LAYOUT_FILE,))
            with translate_store_errors(root):
                sync_directory(root.parent)
        file, before = _begin_edit(root, names)
        with translate_store_errors(root):
            remove_stamp(root)
        single = None if before is None else _edit_names(file, names or (), before)
        with single or _edit_value(root, file) as edited:
            yield edited.value
        pending = file.pending
        if file.stamp is None or pending is None or not _append(root, file, edited.changes):
            _finish(root, file, edited)
            return
        is_recorded = file.is_recorded and _are_recorded(root, edited.changes)
        write_stamp(root, file.stamp, is_recorded=is_recorded)
        if not is_deferred and _is_wanted(file.stamp, pending, is_due=True):
            # The change is durable: an error is left to the next write
            with contextlib.suppress(OSError, AImageError):
                _write_pending(root, file)


@contextlib.contextmanager
def _undoing(undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        # The first error is raised
        with contextlib.suppress(AImageError):
            undo()
        raise


def _begin_edit(
    root: Path, names: Collection[str] | None
) -> tuple[IndexFile, Sequence[Any] | None]:
    """Return the index, and the entries of ``names`` if it is not parsed. Hold the lock."""
    is_prepared = False
    while True:
        file = read_index_file(root, is_locked=True)
        try:
            if not is_prepared:
                is_prepared = True
                if _prepare(root, file):
                    continue
            is_single = file.value is None and names is not None and len(names) <= _MAX_SINGLE
            return file, _find_named(file, names) if names is not None and is_single else None
        except FormatError as error:
            # Another program has written it in place
            if file.is_unchanged():
                raise StoreError(error.message, **error.advice) from None


def _prepare(root: Path, file: IndexFile) -> bool:
    """Write an index whose list cannot take a change; return True if it was written."""
    if file.value is None:
        if is_full := file.pending is not None and file.pending.is_full:
            _write_pending(root, file)
        return is_full
    # One of another program: a change of it is compared with the next index of such a program
    if is_large := len(file.value["manifests"]) > SMALL and _is_locked(root):
        _write_whole(root, file)
    return is_large


def _find_named(file: IndexFile, names: Collection[str]) -> list[Any]:
    found = file.find({text for name in names for text in list_spellings(name)})
    return [entry for entry in found if any(is_named(entry, name) for name in names)]


def _finish(root: Path, file: IndexFile, edited: _Edited) -> None:
    written = _write(root, file, edited)
    if written is not None and edited.is_complete and _is_locked(root):
        write_stamp(root, written, is_recorded=edited.is_recorded)


def _append(root: Path, file: IndexFile, changes: Collection[NameChange]) -> bool:
    """Append changes to the list, if that is possible. Raises StoreError, NoSpaceError."""
    pending = file.pending
    if pending is None or not changes or not _is_locked(root):
        return False
    count = pending.count + sum(change.growth for change in changes)
    if count <= SMALL or not pending.accepts(changes, len(file.text), MAX_INDEX_SIZE):
        return False
    with translate_store_errors(root):
        try:
            pending.append(changes)
        except PermissionError:
            # The file of another user, who may be root, where only a new index can be written
            return False
    return True


def write_index(root: Path) -> int:
    """Write the names that index.json lacks, and return their number, also of removed ones.

    Raises StoreError, NoSpaceError.
    """
    if not (root / PRIVATE).is_dir():
        return 0

    def write(file: IndexFile) -> EntryDifference:
        changes = EntryDifference()
        if file.value is not None:
            changes.apply(file.value["manifests"], _write_whole(root, file)["manifests"])
        elif file.pending is not None and file.pending.is_changed:
            changes = EntryDifference(file.pending.iter_changes())
            _write_pending(root, file)
        return changes

    with hold_lock(root, _LOCK):
        changes = _read_consistently(root, write, is_locked=True)
    entries = [*changes.list_removed(), *changes.list_added()]
    return len({build_key(get_name(entry)) for entry in entries})


def _write_whole(root: Path, file: IndexFile) -> dict[str, Any]:
    """Write an index of another program with all names that it lacks, and return its value."""
    with translate_store_errors(root):
        remove_stamp(root)
    with _edit_value(root, file) as edited:
        pass
    # Also if it lacks none: then it is not compared again
    edited.build = lambda: (encode_index(edited.value),)
    _finish(root, file, edited)
    return edited.value


def write_pending(root: Path, *, is_due: bool) -> None:
    """Write an index that has a list of changes; with ``is_due`` only if that is due.

    Raises StoreError, NoSpaceError.
    """
    # Without the lock at first: it is called often
    stamp = read_index_stamp(root)
    if stamp is None or not has_pending(root, build_name(stamp)):
        return
    with translate_store_errors(root):
        pending = read_pending(root, build_name(stamp))
    if pending is None or not _is_wanted(stamp, pending, is_due=is_due):
        return

    def write(file: IndexFile) -> None:
        # One of another program is written with the next change
        if file.stamp is None or file.pending is None:
            return
        if file.value is not None:
            _write_whole(root, file)
        elif _is_wanted(file.stamp, file.pending, is_due=is_due):
            _write_pending(root, file)

    with hold_lock(root, _LOCK):
        _read_consistently(root, write, is_locked=True)


def _is_wanted(stamp: IndexStamp, pending: PendingNames, *, is_due: bool) -> bool:
    """Return True if an index lacks changes and, with ``is_due``, was not written recently."""
    if not pending.is_changed:
        return False
    age = (time.time_ns() - stamp[2]) / 1e9
    # A clock may have been wrong
    return not (is_due and 0 <= age < max(_MIN_INTERVAL, _MAX_SHARE * pending.seconds))


def _write_pending(root: Path, file: IndexFile) -> None:
    """Write an index with its pending changes. Hold the lock. Raises StoreError, NoSpaceError."""

    def build() -> Iterator[bytes]:
        yield from file.iter_view()
        file.check_unchanged()

    is_recorded = file.is_recorded
    _finish(root, file, _Edited({}, build, is_same=True, is_recorded=is_recorded))


def _is_locked(root: Path) -> bool:
    """Return True if the lock of the index is held, and excludes other processes.

    Where locks have no effect, another process may be writing an index without the last record.
    """
    with contextlib.suppress(OSError):
        return is_file_locked(root / PRIVATE / _LOCK, READ)
    return False


@dataclass(slots=True)
class _Edited:
    """A yielded index.

    ``build`` returns the text in parts; it is None if the text is the same. With ``is_same`` it has
    the pending changes, and no others. ``is_complete`` is True if no recorded name is missing,
    ``is_recorded`` if each entry has a record. ``changes`` are those of single names, if they can
    be appended.
    """

    value: dict[str, Any]
    build: Callable[[], Iterable[bytes | memoryview]] | None = None
    changes: Sequence[NameChange] = ()
    is_same: bool = False
    is_complete: bool = True
    is_recorded: bool = False


@contextlib.contextmanager
def _edit_names(
    file: IndexFile, names: Collection[str], before: Sequence[Any]
) -> Iterator[_Edited]:
    edited = _Edited({"manifests": list(before)}, is_recorded=file.is_recorded)
    yield edited
    after = edited.value["manifests"]
    if after == before:
        return
    texts = {text for name in names for text in list_spellings(name)}

    def build() -> Iterable[bytes | memoryview]:
        raw = file.read_view()
        found = find_lines(raw, texts)
        lines = [line for line in found if any(is_named(line.entry, name) for name in names)]
        # ``replace_lines`` compares the objects of entries
        lines = [
            replace(line, entry=next((old for old in before if old == line.entry), line.entry))
            for line in lines
        ]
        return replace_lines(raw, lines, after)

    edited.build = build
    edited.changes = _list_changes(names, before, after)
    edited.is_recorded = bool(edited.changes and edited.is_recorded) and _are_recorded(
        file.root, edited.changes
    )


def _list_changes(
    names: Collection[str], before: Sequence[Any], after: Sequence[Any]
) -> list[NameChange]:
    """Return the changes of names; none if one of them has several entries."""
    changes = []
    for name in {build_key(name): name for name in names}.values():
        old = [entry for entry in before if is_named(entry, name)]
        new = [entry for entry in after if is_named(entry, name)]
        if len(old) > 1 or len(new) > 1:
            return []
        if old != new:
            changes.append(NameChange(name, next(iter(old), None), next(iter(new), None)))
    return changes


@contextlib.contextmanager
def _edit_value(root: Path, file: IndexFile) -> Iterator[_Edited]:
    path = root / "index.json"
    if file.value is None:
        value, base = _parse(file.read_view(), path), _parse(file.read_text(), path)
        edited = _Edited(value)
    else:
        value, base = _apply_changes(root, file, file.value), file.value
        is_recorded = _record_moves(root, value["manifests"])
        value, is_complete = _restore_names(root, value)
        edited = _Edited(value, is_complete=is_complete, is_recorded=is_recorded)
    before = list(value["manifests"])
    yield edited
    if value != base or file.stamp is None:
        edited.build = lambda: (encode_index(value),)
    if file.value is None:
        edited.changes = _list_removed(before, value["manifests"])
    changes = _list_new(before, value["manifests"]) if edited.is_recorded else ()
    edited.is_recorded = edited.is_recorded and _are_recorded(root, changes)


def _list_removed(before: Sequence[Any], after: Sequence[Any]) -> list[NameChange]:
    """Return the removals of named entries; none if anything else changed."""
    left, kept = {id(entry) for entry in after}, {id(entry) for entry in before}
    gone = [entry for entry in before if id(entry) not in left]
    if left - kept or not all(map(get_name, gone)):
        return []
    return [NameChange(get_name(entry), entry, None) for entry in gone]


def _list_new(before: Sequence[Any], after: Sequence[Any]) -> Iterator[NameChange]:
    """Yield the names whose entries are other objects."""
    old, new = ({id(entry): entry for entry in entries} for entries in (before, after))
    for entry in (old[key] for key in old.keys() - new.keys()):
        if not any(is_named(other, get_name(entry)) for other in map(new.get, new.keys() - old)):
            yield NameChange(get_name(entry), entry, None)
    for entry in (new[key] for key in new.keys() - old.keys()):
        yield NameChange(get_name(entry), None, entry)


class _ReplacedError(Exception):
    """Another program has written the index since it was read."""


def _write(root: Path, file: IndexFile, edited: _Edited) -> IndexStamp | None:
    """Write the index, merged with changes by other tools; return its stamp if it is ours."""
    if edited.build is None:
        return file.stamp if file.value is None else None
    previous = file.pending or file.last
    new = _NewIndex(root, edited.build, file.stamp, previous, is_same=edited.is_same)
    with contextlib.suppress(_ReplacedError):
        return new.write()
    edited.is_recorded = False
    path = root / "index.json"
    value = _parse(b"".join(edited.build()), path)
    base = file.value or _parse(file.read_text(), path)
    while True:
        current = read_index_file(root, is_locked=True)
        if current.value is None:
            theirs = _parse(current.read_text(), path)
        else:
            theirs = _apply_changes(root, current, current.value)
        merge_theirs(value["manifests"], base["manifests"], theirs["manifests"])
        base = theirs
        new = _NewIndex(root, lambda: (encode_index(value),), current.stamp, previous)
        with contextlib.suppress(_ReplacedError):
            return new.write()


@dataclass(slots=True)
class _NewIndex:
    """An index that replaces the one with a stamp, of which ``previous`` has the changes.

    With ``is_same`` it is that one with these changes, and no others.
    """

    root: Path
    build: Callable[[], Iterable[bytes | memoryview]]
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
            stamp = _replace(self.root, "index.json", parts, on_written=self._begin)
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
        if self._count > SMALL and status.st_mtime_ns % 10**6 and _is_locked(self.root):
            # Without a list the index is written again with each change
            with contextlib.suppress(OSError, AImageError):
                name, previous = build_name(build_stamp(status)), self.previous
                self._begun = begin_pending(
                    self.root, name, self._count, previous, is_same=self.is_same
                )
        if read_index_stamp(self.root) != self.stamp:
            raise _ReplacedError


def read_index_stamp(root: Path) -> IndexStamp | None:
    """Return the stamp of the index, None without one. Raises StoreError."""
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
        return build_stamp(os.stat(root / "index.json"))
    return None


def _replace(
    root: Path,
    name: str,
    parts: Iterable[bytes | memoryview],
    *,
    on_written: Callable[[os.stat_result], object] | None = None,
) -> IndexStamp | None:
    """Replace a file, and return its stamp unless another program has replaced it since."""
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

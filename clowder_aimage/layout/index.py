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
import json
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
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.errors import AImageError, FormatError, StoreError, UsageError
from clowder_aimage.layout.index_stamp import (
    IndexStamp,
    build_stamp,
    is_current,
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
    list_pending_paths,
    read_left,
    read_pending,
    remove_superseded,
)
from clowder_aimage.oci import Digest, Reference, mediatype, read_json
from clowder_aimage.oci.reference import DEFAULT_TAG

_LOCK = "lock"
MAX_INDEX_SIZE = 64 * 1024 * 1024
# In order of preference: containerd's exports have only the tag as ref.name.
_NAMES = (
    mediatype.CONTAINERD_NAME,
    mediatype.CONTAINERD_NAME_MISSPELT,
    mediatype.REF_NAME,
)
_HINT = "another program wrote it; move it away to start with an empty index"
# A file that changed within this time may change again with the same stamp: file systems have a
# time resolution of up to two seconds, and a server's clock may differ.
_SETTLED = 5 * 10**9  # nanoseconds


# Names that are edited without parsing the other entries
_MAX_SINGLE = 16
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
    none, since it is not parsed. ``pending`` has the changes since it was written, ``left`` those
    that it may lack, and ``last`` the file of these, if another program wrote it.
    """

    text: Text
    stamp: IndexStamp | None
    value: dict[str, Any] | None
    pending: PendingNames | None = None
    last: PendingNames | None = None
    left: Sequence[NameChange] = ()

    def read_text(self) -> bytes:
        """Return the text of the file. Raises OSError; FormatError: it was written in place."""
        raw = self.text[:]
        if not self.is_unchanged():
            raise FormatError("another program is writing index.json", hint="try again")
        return raw

    def read_parts(self) -> list[bytes | memoryview]:
        """Return the text with the pending changes, in parts. Raises as ``read_text``."""
        raw = self.read_text()
        if self.pending is None or not (changes := EntryDifference(self.pending.iter_changes())):
            return [raw]
        return exchange_lines(raw, changes.removed, changes.list_added_texts())

    def find(self, texts: Collection[str]) -> list[Any]:
        """Return the entries with one of these texts as a string. Raises as ``read_text``."""
        entries = [line.entry for line in find_lines(self.text, texts)]
        if not self.is_unchanged():
            raise FormatError("another program is writing index.json", hint="try again")
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


def read_index(root: Path) -> dict[str, Any]:
    """Return the parsed index with the recorded names; an empty one without a store.

    Raises StoreError: it cannot be read, is not an index, or too large.
    """
    return _read_consistently(root, functools.partial(parse_index, root))


def iter_index(root: Path) -> Iterator[Any]:
    """Return an iterator, which parses a few entries together. Raises as ``read_index``."""

    def begin(file: IndexFile) -> Iterator[Any]:
        if file.value is None:
            return iter_entries(b"".join(file.read_parts()))
        return iter(parse_index(root, file)["manifests"])

    return _read_consistently(root, begin)


def find_entries(root: Path, texts: Collection[str]) -> list[Any]:
    """Return the entries with one of these names or digests, and perhaps others, in order.

    Raises as ``read_index`` does.
    """

    def find(file: IndexFile) -> list[Any]:
        if file.value is None:
            return file.find(texts)
        entries: list[Any] = parse_index(root, file)["manifests"]
        return entries

    return _read_consistently(root, find)


def _read_consistently(root: Path, read: Callable[[IndexFile], T]) -> T:
    """Read an index, and again if another program writes it in place meanwhile."""
    while True:
        file = read_index_file(root)
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
        return _parse(b"".join(file.read_parts()), root / "index.json")
    return _restore_names(root, _apply_changes(root, file, file.value))[0]


def _apply_changes(root: Path, file: IndexFile, value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the value of a file that is compared with the records, with the changes."""
    if file.pending is not None and file.pending.is_changed:
        return _parse(b"".join(file.read_parts()), root / "index.json")
    return value | {"manifests": merge_left(value["manifests"], file.left)}


def merge_left(entries: Sequence[Any], changes: Iterable[NameChange]) -> list[Any]:
    """Return the entries of another program's index with the changes that it may lack.

    An entry that is neither the one before the changes nor ours is that program's, and stays. New
    names that it lacks are left to the records.
    """
    merged: dict[Hashable, NameChange] = {}
    for later in changes:
        earlier = merged.get(key := _build_key(later.name))
        merged[key] = later if earlier is None else replace(later, old=earlier.old)
    result = list[Any]()
    for entry in entries:
        name = get_name(entry)
        change = merged.get(_build_key(name)) if merged and name else None
        if change is None or _get_digest(change.old) != _get_digest(entry):
            result.append(entry)
        elif change.new is not None:
            result.append(change.new)
            # A further entry of the name has the same digest
            merged[_build_key(name)] = replace(change, new=None)
    return result


def _get_digest(entry: Any) -> Any:
    return entry.get("digest") if isinstance(entry, dict) else None


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
        last, left = read_left(root)
        return IndexFile(b"", None, value, None, last, left)


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
        if is_current(root, stamp) and build_stamp(os.fstat(text.fd)) == stamp:
            # A file of another host may disappear while it is open
            is_network = find_mount(root).is_network
            return IndexFile(text[:] if is_network else text, stamp, None, pending)
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
    last, left = read_left(root) if pending is None else (pending, [])
    return IndexFile(raw, stamp, _parse(raw, path), pending, last, left)


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


def _record_moves(root: Path, entries: list[Any]) -> None:
    """Record names that another tool has moved, so that their old targets are not restored."""
    records = MetadataFiles(root, "names")
    ours = records.list_names()
    for entry in entries if ours else ():
        name = get_name(entry)
        if build_file_name(name) not in ours:
            continue
        # Of two entries with one name, the first counts.
        ours.discard(build_file_name(name))
        recorded = (records.get(name) or {}).get("entry")
        if isinstance(recorded, dict) and recorded.get("digest") != entry.get("digest"):
            records.put(name, {"entry": entry}, durable=True)


def _is_here(root: Path, entry: Any) -> bool:
    try:
        digest = Digest.parse(entry["digest"])
        path = os.path.join(root, "blobs", digest.algorithm, digest.encoded)
        return bool(os.stat(path).st_size == entry["size"])
    except (FormatError, UsageError, KeyError, TypeError, OSError):
        return False


def find_entry_name(annotations: Any) -> str:
    """Return the name of an entry with these annotations; empty if it has none."""
    if not isinstance(annotations, dict):
        return ""
    return next((str(annotations[key]) for key in _NAMES if annotations.get(key)), "")


def find_similar_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that resembles another one most, or None."""
    return find_nearest(name, names, cutoff=0.7, suffix=f":{DEFAULT_TAG}")


def get_name(entry: Any) -> str:
    """Return the name of an entry; empty if it has none, or is malformed."""
    return find_entry_name(entry.get("annotations")) if isinstance(entry, dict) else ""


def is_same_name(name: str, reference: Reference) -> bool:
    """Return True if an entry's name means ``reference`` (``model`` is ``model:latest``)."""
    return bool(name) and _parse_name(name) == reference


@functools.lru_cache(maxsize=4096)
def _parse_name(name: str) -> Reference | None:
    with contextlib.suppress(UsageError):
        return Reference.parse(name)
    return None


def is_named(entry: Any, name: str) -> bool:
    """Return True if an entry has a name, in aimage's form or that of another tool."""
    entry_reference, reference = get_name(entry), _parse_name(name)
    return entry_reference == name or (
        reference is not None and is_same_name(entry_reference, reference)
    )


def _build_key(name: str) -> Hashable:
    """Return a value that is equal for two spellings of a name (``is_named``)."""
    return _parse_name(name) or name


def list_spellings(name: str) -> set[str]:
    """Return all texts of a name: ``model`` is ``model:latest``."""
    reference = _parse_name(name)
    if reference is None:
        return {name}
    is_short = reference.tag == DEFAULT_TAG and reference.digest is None
    return {name, str(reference)} | ({reference.name} if is_short else set())


@contextlib.contextmanager
def edit_index(
    root: Path, names: Collection[str] | None = None, *, is_deferred: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the index for changes in place, and write it or its list when the block ends.

    With ``names`` it may have only the entries of these names. Entries are replaced, and not
    changed. Unknown fields and entries are kept. Concurrent changes by other tools are merged. With
    ``is_deferred`` the caller calls ``write_pending`` later, for a large index.
    """
    with hold_lock(root, _LOCK):
        if not (root / "oci-layout").exists():
            _replace(root, "oci-layout", LAYOUT_FILE)
            with translate_store_errors(root):
                sync_directory(root.parent)
        file = read_index_file(root, is_locked=True)
        if file.value is None and file.pending is not None and file.pending.is_full:
            _write_pending(root, file, file.pending)
            file = read_index_file(root, is_locked=True)
        with translate_store_errors(root):
            remove_stamp(root)
        is_single = file.value is None and names is not None and len(names) <= _MAX_SINGLE
        with _edit_names(file, names or ()) if is_single else _edit_value(root, file) as edited:
            yield edited.value
        pending = file.pending
        if file.stamp is None or pending is None or not _append(root, file, edited.changes):
            _finish(root, file, edited)
            return
        write_stamp(root, file.stamp)
        if not is_deferred and _is_wanted(file.stamp, pending, is_due=True):
            # The change is durable: an error is left to the next write
            with contextlib.suppress(OSError, AImageError):
                _write_pending(root, file, pending)


def _finish(root: Path, file: IndexFile, edited: _Edited) -> None:
    written = _write(root, file, edited)
    if written is not None and edited.is_complete and _is_locked(root):
        write_stamp(root, written)


def _append(root: Path, file: IndexFile, changes: Collection[NameChange]) -> bool:
    """Append changes to the list, if that is possible. Raises StoreError, NoSpaceError."""
    pending = file.pending
    if pending is None or not changes or not _is_locked(root):
        return False
    count = pending.count + sum(change.growth for change in changes)
    if count <= SMALL or not pending.accepts(changes, len(file.text), MAX_INDEX_SIZE):
        return False
    with translate_store_errors(root):
        pending.append(changes)
    return True


def write_index(root: Path) -> int:
    """Write the names that index.json lacks, and return their number, also of removed ones.

    Raises StoreError, NoSpaceError.
    """
    if not (root / PRIVATE).is_dir():
        return 0
    with hold_lock(root, _LOCK):
        file, changes = read_index_file(root, is_locked=True), EntryDifference()
        if file.value is None:
            if file.pending is not None and file.pending.is_changed:
                changes = EntryDifference(file.pending.iter_changes())
                _write_pending(root, file, file.pending)
        else:
            with translate_store_errors(root):
                remove_stamp(root)
            with _edit_value(root, file) as edited:
                changes.apply(file.value["manifests"], edited.value["manifests"])
            _finish(root, file, edited)
    entries = [*changes.list_removed(), *changes.list_added()]
    return len({_build_key(get_name(entry)) for entry in entries})


def write_pending(root: Path, *, is_due: bool) -> None:
    """Write an index that has a list of changes; with ``is_due`` only if that is due.

    Raises StoreError, NoSpaceError.
    """
    # Without the lock at first: it is called often
    if (stamp := read_index_stamp(root)) is None:
        return
    with translate_store_errors(root):
        pending = read_pending(root, build_name(stamp))
    if pending is None or not _is_wanted(stamp, pending, is_due=is_due):
        return
    with hold_lock(root, _LOCK):
        file = read_index_file(root, is_locked=True)
        stamp, pending = file.stamp, file.pending
        # One of another program is written with the next change
        if file.value is not None or stamp is None or pending is None:
            return
        if _is_wanted(stamp, pending, is_due=is_due):
            _write_pending(root, file, pending)


def _is_wanted(stamp: IndexStamp, pending: PendingNames, *, is_due: bool) -> bool:
    """Return True if an index lacks changes and, with ``is_due``, was not written recently."""
    if not pending.is_changed:
        return False
    age = (time.time_ns() - stamp[2]) / 1e9
    # A clock may have been wrong
    return not (is_due and 0 <= age < max(_MIN_INTERVAL, _MAX_SHARE * pending.seconds))


def _write_pending(root: Path, file: IndexFile, pending: PendingNames) -> None:
    """Write an index with its pending changes. Hold the lock. Raises StoreError, NoSpaceError."""

    def build() -> tuple[bytes, Sequence[bytes | memoryview]]:
        raw, changes = file.read_text(), EntryDifference(pending.iter_changes())
        return raw, exchange_lines(raw, changes.removed, changes.list_added_texts())

    _finish(root, file, _Edited({}, build, count=pending.count, is_same=True))


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

    ``build`` returns the text that was read, and the parts of the new one; None if it is the same.
    ``count`` is the number of entries, None if it is unknown. With ``is_same`` the new index has
    the pending changes, and no others. ``is_complete`` is True if no recorded name is missing.
    ``changes`` are those of single names, if they can be appended.
    """

    value: dict[str, Any]
    build: Callable[[], tuple[bytes, Sequence[bytes | memoryview]]] | None = None
    changes: Sequence[NameChange] = ()
    count: int | None = None
    is_same: bool = False
    is_complete: bool = True


@contextlib.contextmanager
def _edit_names(file: IndexFile, names: Collection[str]) -> Iterator[_Edited]:
    texts = {text for name in names for text in list_spellings(name)}
    found = file.find(texts)
    before = [entry for entry in found if any(is_named(entry, name) for name in names)]
    edited = _Edited({"manifests": list(before)})
    yield edited
    after = edited.value["manifests"]
    if after == before:
        return

    def build() -> tuple[bytes, Sequence[bytes | memoryview]]:
        raw = b"".join(file.read_parts())
        found = find_lines(raw, texts)
        lines = [line for line in found if any(is_named(line.entry, name) for name in names)]
        # ``replace_lines`` compares the objects of entries
        lines = [replace(line, entry=old) for line, old in zip(lines, before, strict=True)]
        return file.read_text(), replace_lines(raw, lines, after)

    edited.build = build
    edited.changes = _list_changes(names, before, after)


def _list_changes(
    names: Collection[str], before: Sequence[Any], after: Sequence[Any]
) -> list[NameChange]:
    """Return the changes of names; none if one of them has several entries."""
    changes = []
    for name in {_build_key(name): name for name in names}.values():
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
    raw = file.read_text()
    base = _parse(raw, path) if file.value is None else file.value
    is_complete = True
    if file.value is None:
        value = _copy(base)
        if file.pending is not None and file.pending.is_changed:
            value = _parse(b"".join(file.read_parts()), path)
    else:
        value = _apply_changes(root, file, file.value)
        _record_moves(root, value["manifests"])
        value, is_complete = _restore_names(root, value)
    edited = _Edited(value, is_complete=is_complete)
    yield edited
    if value != base or file.stamp is None:
        edited.build = lambda: (raw, [encode_index(value)])
        edited.count = len(value["manifests"])


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    return value | {"manifests": list(value["manifests"])}


def _write(root: Path, file: IndexFile, edited: _Edited) -> IndexStamp | None:
    """Write the index, merged with changes by other tools; return its stamp if it is ours."""
    stamp, started = file.stamp, time.monotonic()
    if edited.build is None:
        return stamp if file.value is None else None
    with translate_store_errors(root):
        raw, parts = edited.build()
    path, value, base = root / "index.json", None, None
    # Checked as late as possible: another tool's write would be lost.
    while read_index_stamp(root) != stamp:
        current = read_index_file(root, is_locked=True)
        value = value or _parse(b"".join(parts), path)
        base = base or file.value or _parse(raw, path)
        theirs = current.value or _parse(current.text[:], path)
        _merge(value["manifests"], base["manifests"], theirs["manifests"])
        base, stamp, parts = theirs, current.stamp, [encode_index(value)]
    count = edited.count
    if value is not None:
        count = len(value["manifests"])
    elif count is None:
        # A line before the entries, and two after them
        count = sum(bytes(part).count(b"\n") for part in parts) - 2
    is_same = edited.is_same and value is None
    return _replace_index(root, parts, count, file, is_same=is_same, started=started)


def _replace_index(
    root: Path,
    parts: Sequence[bytes | memoryview],
    count: int,
    file: IndexFile,
    *,
    is_same: bool,
    started: float,
) -> IndexStamp | None:
    """Write the index, and begin the list of its changes if it is large."""
    begun: PendingNames | None = None
    previous = file.pending or file.last

    def begin(status: os.stat_result) -> None:
        nonlocal begun
        if count > SMALL and _is_locked(root):
            # Without a list the index is written again with each change
            with contextlib.suppress(OSError, AImageError):
                name = build_name(build_stamp(status))
                begun = begin_pending(root, name, count, previous, is_same=is_same)

    try:
        stamp = _replace(root, "index.json", *parts, on_written=begin)
    except BaseException:
        if begun is not None:
            begun.remove()
        raise
    with contextlib.suppress(OSError, AImageError):
        if begun is not None:
            begun.confirm(time.monotonic() - started)
        remove_superseded(root, begun)
    return stamp


def _merge(ours: list[Any], base: list[Any], theirs: list[Any]) -> None:
    """Add to ``ours`` entries that another tool added or renamed after ``base`` was read."""
    known = set(map(_encode_sorted, base))
    positions: dict[Hashable, int] = {}
    for position, entry in enumerate(ours):
        if name := get_name(entry):
            positions.setdefault(_build_key(name), position)
    for entry in theirs:
        if _encode_sorted(entry) in known:
            continue
        name = get_name(entry)
        place = positions.get(_build_key(name)) if name else None
        if place is None:
            if name:
                positions[_build_key(name)] = len(ours)
            ours.append(entry)
        elif _encode_sorted(ours[place]) in known:
            # If this process changed the entry, too, its change wins.
            ours[place] = entry


def _encode_sorted(entry: Any) -> str:
    return json.dumps(entry, sort_keys=True)


def read_index_stamp(root: Path) -> IndexStamp | None:
    """Return the stamp of the index, None without one. Raises StoreError."""
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
        return build_stamp(os.stat(root / "index.json"))
    return None


def _replace(
    root: Path,
    name: str,
    *parts: bytes | memoryview,
    on_written: Callable[[os.stat_result], object] | None = None,
) -> IndexStamp | None:
    """Replace a file, and return its stamp unless another program has replaced it since."""
    path, timestamp = root / name, time.time_ns()
    size = sum(map(len, parts))
    if size > MAX_INDEX_SIZE:
        raise StoreError(
            f"{path} would have {size} bytes, the limit is {MAX_INDEX_SIZE}",
            hint="remove names that are no longer needed",
        )
    with translate_store_errors(root):
        private = make_directory(root, PRIVATE)
        write_shared(path, *parts, directory=private, time_ns=timestamp, on_written=on_written)
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

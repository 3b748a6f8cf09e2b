"""index.json: merged and replaced under an interprocess lock.

Other tools do not lock, and may overwrite changes. Every name that aimage sets is first recorded
in a separate file (``.aimage/names``). A name that is missing from the index is read from there
(index_file.py), and restored by the next write.

A large index is written seldom: until then, changes are in a list (pending_names.py), and reads
apply it. If another program writes the index meanwhile, its entry of a name counts if it is neither
the one before our change nor ours.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.store import LAYOUT_FILE
from clowder_aimage.errors import AImageError, FormatError, StoreError
from clowder_aimage.layout.entry_name import build_key, get_name, is_named, list_spellings
from clowder_aimage.layout.index_file import (
    LOCK,
    MAX_INDEX_SIZE,
    IndexFile,
    is_index_locked,
    parse_index,
    read_consistently,
    read_index_file,
    read_index_stamp,
)
from clowder_aimage.layout.index_replacement import Build, replace_file, replace_index
from clowder_aimage.layout.index_stamp import IndexStamp, remove_stamp, write_stamp
from clowder_aimage.layout.index_text import encode_index, find_lines, iter_encoded, replace_lines
from clowder_aimage.layout.lock import PRIVATE, hold_lock, translate_store_errors
from clowder_aimage.layout.name_record import RecordedEntries, are_recorded
from clowder_aimage.layout.pending_names import (
    EntryDifference,
    NameChange,
    PendingNames,
    build_name,
    has_pending,
    is_large,
    read_pending,
)

# Names that are edited without parsing the other entries
_MAX_SINGLE = 16
# Seconds, and times of the last duration, after which a large index is written again
_MIN_INTERVAL, _MAX_SHARE = 1.0, 20


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
    with hold_lock(root, LOCK), _undoing(undo):
        if not (root / "oci-layout").exists():
            replace_file(root, "oci-layout", (LAYOUT_FILE,))
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
        is_recorded = file.is_recorded and are_recorded(root, edited.changes)
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
    if needs_list := is_large(len(file.value["manifests"])) and is_index_locked(root):
        _write_whole(root, file)
    return needs_list


def _find_named(file: IndexFile, names: Collection[str]) -> list[Any]:
    found = file.find({text for name in names for text in list_spellings(name)})
    return [entry for entry in found if any(is_named(entry, name) for name in names)]


def _finish(root: Path, file: IndexFile, edited: _Edited) -> None:
    """Write the index if it differs, and record that it is ours. Hold the lock."""
    written, is_ours = (file.stamp if file.value is None else None), True
    if edited.build is not None:
        written, is_ours = replace_index(root, file, edited.build, is_same=edited.is_same)
    if written is not None and edited.is_complete and is_index_locked(root):
        write_stamp(root, written, is_recorded=edited.is_recorded and is_ours)


def _append(root: Path, file: IndexFile, changes: Collection[NameChange]) -> bool:
    """Append changes to the list, if that is possible. Raises StoreError, NoSpaceError."""
    pending = file.pending
    if pending is None or not changes or not is_index_locked(root):
        return False
    count = pending.count + sum(change.growth for change in changes)
    if not is_large(count) or not pending.accepts(changes, len(file.text), MAX_INDEX_SIZE):
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

    def write(file: IndexFile) -> set[Hashable]:
        changes = EntryDifference(() if file.pending is None else file.pending.iter_changes())
        entries = [*changes.list_removed(), *changes.list_added()]
        names = {build_key(get_name(entry)) for entry in entries}
        if file.value is not None:
            names |= _write_whole(root, file)
        elif names:
            _write_pending(root, file)
        return names

    with hold_lock(root, LOCK):
        return len(read_consistently(root, write, is_locked=True))


def _write_whole(root: Path, file: IndexFile) -> set[Hashable]:
    """Write an index of another program with all names that it lacks, and return their keys.

    It is written even if it lacks none: then it is not compared again. Hold the lock. Raises
    StoreError, NoSpaceError.
    """
    edited, names = _Edited({}), set[Hashable]()

    def build() -> Iterator[bytes]:
        entries = RecordedEntries(root, file.iter_merged(names), follows=True)
        yield from iter_encoded(file.value or {}, entries)
        edited.is_complete, edited.is_recorded = entries.is_complete, entries.is_recorded
        names.update(build_key(get_name(entry)) for entry in entries.restored)

    with translate_store_errors(root):
        remove_stamp(root)
    edited.build = build
    _finish(root, file, edited)
    # It refers to the object itself, and to the text of the index
    edited.build = None
    return names


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

    with hold_lock(root, LOCK):
        read_consistently(root, write, is_locked=True)


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


@dataclass(slots=True)
class _Edited:
    """A yielded index.

    ``build`` returns the text in parts; it is None if the text is the same. With ``is_same`` it has
    the pending changes, and no others. ``is_complete`` is True if no recorded name is missing,
    ``is_recorded`` if each entry has a record. ``changes`` are those of single names, if they can
    be appended.
    """

    value: dict[str, Any]
    build: Build | None = None
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
    edited.is_recorded = bool(edited.changes and edited.is_recorded) and are_recorded(
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
    if file.value is None:
        base, value = file.read_value(), parse_index(file.read_view(), root)
        value["manifests"] = list(value["manifests"])
        edited = _Edited(value)
    else:
        entries = RecordedEntries(root, file.iter_merged(), follows=True)
        base, value = file.value, file.value | {"manifests": list(entries)}
        edited = _Edited(value, is_complete=entries.is_complete, is_recorded=entries.is_recorded)
    before = list(value["manifests"])
    yield edited
    if value != base | {"manifests": list(base["manifests"])} or file.stamp is None:
        edited.build = lambda: (encode_index(value),)
    if file.value is None:
        edited.changes = _list_removed(before, value["manifests"])
    changes = _list_new(before, value["manifests"]) if edited.is_recorded else ()
    edited.is_recorded = edited.is_recorded and are_recorded(root, changes)


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

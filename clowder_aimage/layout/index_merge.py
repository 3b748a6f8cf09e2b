"""Entries that another program wrote, merged with the changes of aimage."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clowder_aimage.layout.entry_name import build_key, get_name
from clowder_aimage.layout.pending_names import NameChange, PendingNames
from clowder_aimage.oci import mediatype

# Nanoseconds in which a program that has read an index writes it again
_MOMENT = 5 * 10**9


class EntryScan:
    """The changes that another program's index lacks, found by its entries.

    ``files`` are the lists of changes, the last one first. ``left`` are the names that another
    program has taken from our entries.
    """

    def __init__(self, files: Sequence[PendingNames]) -> None:
        self._files = files
        self._groups = [_collapse(file.iter_changes()) for file in files]
        names = {name for group in self._groups for name in group}
        self._found: dict[Hashable, list[Any]] = {name: [] for name in names}
        self.left = set[str]()

    def visit(self, entries: Iterable[Any]) -> None:
        """Read further entries of the index."""
        for entry in entries:
            annotations = _get_annotations(entry)
            if mediatype.CONTAINERD_NAME in annotations and mediatype.REF_NAME not in annotations:
                self.left.add(str(annotations[mediatype.CONTAINERD_NAME]))
            if self._found:
                found = self._found.get(build_key(get_name(entry)))
                if found is not None:
                    found.append(entry)

    def find_lacking(self, written_ns: int) -> list[NameChange]:
        """Return the changes that the index of that time in nanoseconds lacks, in order.

        Its program had read one of the last indexes of aimage, to which its names are most alike,
        and has none of the later changes. If the last index differs by a single name more, that
        one may also have been set back on purpose.
        """
        digests = {name: set(map(get_digest, found)) for name, found in self._found.items()}
        values = [_list_values(self._groups, base) for base in range(len(self._groups))]
        differing = [
            {name for name, value in before.items() if value not in (digests[name] or {None})}
            for before in values
        ]
        counts = list(map(len, differing))
        base = counts.index(min(counts)) if counts else 0
        is_written = all(file.is_begun for file in self._files[:base])
        if base and counts[0] - counts[base] == 1 and is_written:
            names = differing[0] - differing[base]
            is_recent = abs(written_ns - self._files[0].time_ns) < _MOMENT
            if all(self._is_set_back(name, base, is_recent=is_recent) for name in names):
                base = 0
        groups = reversed(self._groups[: base + 1])
        return [change for group in groups for change in group.values()]

    def _is_set_back(self, name: Hashable, base: int, *, is_recent: bool) -> bool:
        """Return True if another program has read the changes of a name, and undone them.

        One that had not read them has the entry before them. One that sets a name makes an entry
        of its own form, and leaves ours without the name; so the last index does not differ.
        """
        changes = [group[name] for group in self._groups[1 : base + 1] if name in group]
        old, is_removal = changes[-1].old, changes[0].new is None
        has_own_form = any(not _is_ours(entry) for entry in self._found[name])
        # A removal leaves nothing that shows what was read
        return has_own_form and (_is_ours(old) or (is_removal and not is_recent))


def _list_values(groups: Sequence[Mapping[Hashable, NameChange]], base: int) -> dict[Hashable, Any]:
    """Return the digests of names in the index before the changes of a group."""
    values: dict[Hashable, Any] = {}
    for group in groups[: base + 1]:
        values |= {name: get_digest(change.old) for name, change in group.items()}
    for group in groups[base + 1 :]:
        for name, change in group.items():
            values.setdefault(name, get_digest(change.new))
    return values


def _is_ours(entry: Any) -> bool:
    """Return True if an entry is in the form of aimage, which has the name of containerd, too."""
    return mediatype.CONTAINERD_NAME in _get_annotations(entry)


def _collapse(changes: Iterable[NameChange]) -> dict[Hashable, NameChange]:
    """Return one change for each name."""
    net: dict[Hashable, NameChange] = {}
    for change in changes:
        earlier = net.get(key := build_key(change.name))
        net[key] = change if earlier is None else replace(change, old=earlier.old)
    return net


def merge_left(
    entries: Iterable[Any], changes: Iterable[NameChange], changed: set[Hashable] | None = None
) -> Iterator[Any]:
    """Yield the entries of another program's index with the changes that it lacks.

    An entry that is neither the one before the changes nor ours is that program's, and stays. New
    names that it lacks are left to the records. Names whose entries differ are added to
    ``changed``.
    """
    net = _collapse(changes)
    if not net:
        yield from entries
        return
    for entry in entries:
        name = get_name(entry)
        change = net.get(build_key(name)) if name else None
        if change is None or get_digest(change.old) != get_digest(entry):
            yield entry
            continue
        if changed is not None:
            changed.add(build_key(name))
        if change.new is not None:
            yield change.new
            # A further entry of the name has the same digest
            net[build_key(name)] = replace(change, new=None)


def find_moved(entries: Iterable[Any], left: Collection[str]) -> set[str]:
    """Return the names that skopeo moved (``drop_replaced``), of those it took from our entries."""
    moved = set[str]()
    for entry in entries if left else ():
        annotations = _get_annotations(entry)
        name = str(annotations.get(mediatype.REF_NAME))
        if name in left and mediatype.CONTAINERD_NAME not in annotations:
            moved.add(name)
    return moved


def drop_replaced(entries: Iterable[Any], moved: Collection[str]) -> Iterator[Any]:
    """Yield the entries without ours of names that skopeo moved.

    It takes the name from an entry, though not that of containerd, and appends one of its own.
    """
    if not moved:
        yield from entries
        return
    for entry in entries:
        annotations = _get_annotations(entry)
        ours = annotations.get(mediatype.CONTAINERD_NAME)
        if ours is None or str(ours) not in moved or mediatype.REF_NAME in annotations:
            yield entry


def _get_annotations(entry: Any) -> dict[str, Any]:
    annotations = entry.get("annotations") if isinstance(entry, dict) else None
    return annotations if isinstance(annotations, dict) else {}


def get_digest(entry: Any) -> Any:
    """Return the digest of an entry; None if it has none."""
    digest = entry.get("digest") if isinstance(entry, dict) else None
    return digest if isinstance(digest, str) else None


def merge_theirs(ours: list[Any], base: list[Any], theirs: list[Any]) -> None:
    """Add to ``ours`` entries that another tool added or renamed after ``base`` was read."""
    known = set(map(_encode_sorted, base))
    positions: dict[Hashable, int] = {}
    for position, entry in enumerate(ours):
        if name := get_name(entry):
            positions.setdefault(build_key(name), position)
    for entry in theirs:
        if _encode_sorted(entry) in known:
            continue
        name = get_name(entry)
        place = positions.get(build_key(name)) if name else None
        if place is None:
            if name:
                positions[build_key(name)] = len(ours)
            ours.append(entry)
        elif _encode_sorted(ours[place]) in known:
            # If this process changed the entry, too, its change wins.
            ours[place] = entry


def _encode_sorted(entry: Any) -> str:
    return json.dumps(entry, sort_keys=True)

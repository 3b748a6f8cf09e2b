"""Entries that another program wrote, merged with the changes of aimage."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clowder_aimage.layout.entry_name import build_key, get_name
from clowder_aimage.layout.pending_names import NameChange, PendingNames
from clowder_aimage.oci import mediatype

# Nanoseconds in which a program that has read an index writes it again
_MOMENT = 5 * 10**9


def find_lacking(
    entries: Sequence[Any], files: Sequence[PendingNames], written_ns: int
) -> list[NameChange]:
    """Return the changes that another program's index lacks, in order.

    That program had read one of the last indexes of aimage, to which its names are most alike, and
    has none of the later changes. If the last index differs by a single name more, that may also
    have been moved back on purpose, unless it is recent.

    Args:
        entries: The entries of that index.
        files: The lists of changes, the last one first.
        written_ns: The time of that index, in nanoseconds.
    """
    groups = [_collapse(file.iter_changes()) for file in files]
    names = {name for group in groups for name in group}
    digests: dict[Hashable, set[Any]] = {name: set() for name in names}
    for entry in entries if names else ():
        if (found := digests.get(build_key(get_name(entry)))) is not None:
            found.add(get_digest(entry))
    counts = [_count_differences(digests, groups, base) for base in range(len(groups))]
    base = counts.index(min(counts)) if counts else 0
    is_written = all(file.is_begun for file in files[:base])
    if base and counts[0] - counts[base] == 1 and is_written:
        base = base if abs(written_ns - files[0].time_ns) < _MOMENT else 0
    return [change for group in reversed(groups[: base + 1]) for change in group.values()]


def _count_differences(
    digests: Mapping[Hashable, set[Any]],
    groups: Sequence[Mapping[Hashable, NameChange]],
    base: int,
) -> int:
    """Return how many names have other digests than in the index before the changes of a group."""
    values: dict[Hashable, Any] = {}
    for group in groups[:base]:
        values |= {name: get_digest(change.old) for name, change in group.items()}
    values |= {name: get_digest(change.old) for name, change in groups[base].items()}
    for group in groups[base + 1 :]:
        for name, change in group.items():
            values.setdefault(name, get_digest(change.new))
    return sum(value not in (digests[name] or {None}) for name, value in values.items())


def _collapse(changes: Iterable[NameChange]) -> dict[Hashable, NameChange]:
    """Return one change for each name."""
    net: dict[Hashable, NameChange] = {}
    for change in changes:
        earlier = net.get(key := build_key(change.name))
        net[key] = change if earlier is None else replace(change, old=earlier.old)
    return net


def merge_left(entries: Sequence[Any], changes: Iterable[NameChange]) -> list[Any]:
    """Return the entries of another program's index with the changes that it lacks.

    An entry that is neither the one before the changes nor ours is that program's, and stays. New
    names that it lacks are left to the records.
    """
    net, result = _collapse(changes), list[Any]()
    for entry in entries:
        name = get_name(entry)
        change = net.get(build_key(name)) if net and name else None
        if change is None or get_digest(change.old) != get_digest(entry):
            result.append(entry)
        elif change.new is not None:
            result.append(change.new)
            # A further entry of the name has the same digest
            net[build_key(name)] = replace(change, new=None)
    return result


def drop_replaced(entries: Sequence[Any]) -> list[Any]:
    """Drop our entries of names that skopeo moved.

    It takes the name from an entry, though not that of containerd, and appends one of its own.
    """
    marks = [_get_annotations(entry) for entry in entries]
    ours, theirs = mediatype.CONTAINERD_NAME, mediatype.REF_NAME
    moved = {str(mark[theirs]) for mark in marks if mark.get(theirs) and ours not in mark}
    return [
        entry
        for entry, mark in zip(entries, marks, strict=True)
        if theirs in mark or str(mark.get(ours)) not in moved
    ]


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

"""Entries that another program wrote, merged with the changes of aimage."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clowder_aimage.layout.entry_name import build_key, get_name
from clowder_aimage.layout.pending_names import NameChange, PendingNames

# Nanoseconds in which a program that has read an index writes it again
_MOMENT = 5 * 10**9


def find_lacking(
    entries: Sequence[Any], files: Iterable[PendingNames], written_ns: int
) -> list[NameChange]:
    """Return the changes that another program's index lacks, in order.

    These are the ones since the last index of aimage was written. Earlier ones are lacking, too, if
    that program had read an index before them: then it has none of them. A single one may also have
    been undone on purpose, unless it is recent.

    Args:
        entries: The entries of that index.
        files: The lists of changes, the last one first.
        written_ns: The time of that index, in nanoseconds.
    """
    digests: dict[Hashable, set[Any]] = {}
    for entry in entries:
        if name := get_name(entry):
            digests.setdefault(build_key(name), set()).add(get_digest(entry))
    changes, is_written, later_ns = list[NameChange](), False, 0
    for file in files:
        net = _collapse(file.iter_changes())
        is_recent = abs(written_ns - later_ns) < _MOMENT
        if is_written and not _lacks(digests, net.values(), is_recent=is_recent):
            break
        changes = [*net.values(), *changes]
        is_written, later_ns = is_written or file.is_begun, file.time_ns
    return changes


def _lacks(
    digests: Mapping[Hashable, set[Any]], changes: Iterable[NameChange], *, is_recent: bool
) -> bool:
    """Return True if the index with these digests of names has none of the changes."""
    before = after = 0
    for change in changes:
        old, new = get_digest(change.old), get_digest(change.new)
        found = digests.get(build_key(change.name), {None})
        before += old in found and new not in found
        after += new in found and old not in found
    return not after and (before > 1 or is_recent or not before)


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

"""The records of names (``.aimage/names``), compared with the entries of an index."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.layout.entry_name import get_name, list_spellings
from clowder_aimage.layout.metadata import MetadataFiles, build_file_name
from clowder_aimage.layout.pending_names import NameChange, encode_entry
from clowder_aimage.oci import Digest


class RecordedEntries:
    """The entries of another program's index, and the recorded names that it has dropped.

    After an iteration ``restored`` has the entries of these; ``is_complete`` is True if no other
    one is left that may be restored later. With ``follows`` the records of names that the program
    has moved are changed, so that their old targets are not restored, and then ``is_recorded`` is
    True if each entry has a name, and a record that has the entry. Raises StoreError, NoSpaceError.
    """

    def __init__(self, root: Path, entries: Iterable[Any], *, follows: bool = False) -> None:
        self._root, self._entries, self._follows = root, entries, follows
        self._records = MetadataFiles(root, "names")
        self.restored: list[Any] = []
        self.is_complete, self.is_recorded = True, follows

    def __iter__(self) -> Iterator[Any]:
        self.restored, self.is_complete, self.is_recorded = [], True, self._follows
        ours = self._records.list_names()
        if not ours and not self._follows:
            yield from self._entries
            return
        for entry in self._entries:
            name = get_name(entry)
            # Of two entries with one name, the first counts
            if (file_name := build_file_name(name)) in ours and name:
                ours.discard(file_name)
                if self._follows:
                    self._follow(name, entry)
            else:
                self.is_recorded = False
            yield entry
        for file_name in sorted(ours):
            record = self._records.read(file_name)
            if record is None or not isinstance(entry := record.get("entry"), dict):
                continue
            # An entry of a read-only store, or one whose manifest is still stored
            if record.get("elsewhere") or _is_here(self._root, entry):
                self.restored.append(entry)
                yield entry
            else:
                self.is_complete = False

    def _follow(self, name: str, entry: Any) -> None:
        recorded = (self._records.get(name) or {}).get("entry")
        if isinstance(recorded, dict) and recorded.get("digest") != entry.get("digest"):
            self._records.put(name, {"entry": entry}, durable=True)
        elif encode_entry(recorded) != encode_entry(entry):
            # Also if only the order of its fields differs: the list compares texts
            self.is_recorded = False


def are_recorded(root: Path, changes: Iterable[NameChange]) -> bool:
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

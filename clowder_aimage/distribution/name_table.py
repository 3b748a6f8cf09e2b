"""The names of a store as repositories, found by tag and by digest. Independent of HTTP.

A store may have 100,000 names, most of them in repositories of their own: a name is kept as a few
bytes, and its entry is built when it is looked up.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.layout.entry_name import get_name
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype

_NO_FIELDS: Mapping[str, Any] = {}
# The number of the media type, the bytes of the digest, and the size. The digest follows, and then
# the name if it is not spelt as repository and target.
_HEAD = struct.Struct("<IBQ")
_ALGORITHMS = {32: "sha256", 64: "sha512"}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A name in the layout; ``tag`` is None if it is a digest."""

    name: str
    repository: str
    tag: str | None
    descriptor: Descriptor

    @property
    def target(self) -> str:
        """The tag, or else the digest."""
        return str(self.descriptor.digest) if self.tag is None else self.tag


@dataclass(slots=True)
class _Repository:
    """Names of a repository: a record of each target, and the targets of each digest in order."""

    records: dict[str, bytes] = field(default_factory=dict)
    targets: dict[bytes, str | dict[str, None]] = field(default_factory=dict)
    indexes: dict[str, None] = field(default_factory=dict)

    def find(self, digest: bytes) -> Iterable[str]:
        found = self.targets.get(digest, ())
        return (found,) if isinstance(found, str) else found

    def add(self, target: str, record: bytes) -> None:
        self.records[target] = record
        digest = _get_digest(record)
        others = self.targets.get(digest)
        if others is None:
            self.targets[digest] = target
        elif isinstance(others, str):
            self.targets[digest] = {others: None, target: None}
        else:
            others[target] = None

    def remove(self, target: str) -> None:
        digest = _get_digest(self.records.pop(target))
        self.indexes.pop(target, None)
        others = self.targets[digest]
        if isinstance(others, dict) and len(others) > 1:
            del others[target]
        else:
            del self.targets[digest]


def _get_digest(record: bytes) -> bytes:
    return record[_HEAD.size : _HEAD.size + record[4]]


class NameTable:
    """The names of one store below ``base``, without it. Calls must not overlap.

    A repository is its only target with the record, or a ``_Repository``. Further entries with the
    name of another one are rare, and kept apart.
    """

    def __init__(self, reader: EntryReader, base: str) -> None:
        self._reader, self._base = reader, base
        self._repositories: dict[str, tuple[str, bytes] | _Repository] = {}
        self._further: dict[str, list[CatalogEntry]] = {}
        self._media_types: dict[str, int] = {}
        self._numbers: list[str] = []

    def refresh(self) -> None:
        """Read what changed since the last call. Raises StoreError."""
        changes = self._reader.read()
        if changes is None:
            return
        if changes.removed is not None and not self._further:
            self._remove(changes.removed)
            self._add(changes.added)
            if not self._further:
                return
        if changes.removed is not None:
            # Which of two entries with one name is the first depends on all of them
            self._reader.reset()
            changes = self._reader.read()
        self._repositories, self._further = {}, {}
        self._add([] if changes is None else changes.added)

    def _remove(self, entries: Iterable[Any]) -> None:
        for entry in self._parse(entries):
            names = self._repositories[entry.repository]
            if isinstance(names, _Repository):
                names.remove(entry.target)
                if names.records:
                    continue
            del self._repositories[entry.repository]

    def _add(self, entries: Iterable[Any]) -> None:
        for entry in self._parse(entries):
            key, target, record = entry.repository, entry.target, self._encode(entry)
            is_index = entry.descriptor.media_type in mediatype.INDEXES
            names = self._repositories.get(key)
            if names is None and not is_index:
                self._repositories[key] = sys.intern(target), record
                continue
            if not isinstance(names, _Repository):
                self._repositories[key] = repository = _Repository()
                if names is not None:
                    repository.add(*names)
                names = repository
            if target in names.records:
                self._further.setdefault(key, []).append(entry)
                continue
            names.add(target, record)
            if is_index:
                names.indexes[target] = None

    def _encode(self, entry: CatalogEntry) -> bytes:
        content = entry.descriptor
        number = self._media_types.setdefault(content.media_type, len(self._numbers))
        if number == len(self._numbers):
            self._numbers.append(content.media_type)
        digest = bytes.fromhex(content.digest.encoded)
        spelt = (
            b""
            if entry.name == self._spell(entry.repository, entry.tag, content.digest)
            else (entry.name.encode())
        )
        return _HEAD.pack(number, len(digest), content.size) + digest + spelt

    def _decode(self, repository: str, target: str, record: bytes) -> CatalogEntry:
        number, length, size = _HEAD.unpack_from(record)
        digest = Digest(_ALGORITHMS[length], _get_digest(record).hex())
        tag = None if ":" in target else target
        spelt = record[_HEAD.size + length :].decode()
        # Without annotations, which have the name again
        content = Descriptor(self._numbers[number], digest, size, _NO_FIELDS, _NO_FIELDS)
        name = spelt or self._spell(repository, tag, digest)
        return CatalogEntry(name, repository, tag, content)

    def _spell(self, repository: str, tag: str | None, digest: Digest) -> str:
        return f"{self._base}{repository}" + (f"@{digest}" if tag is None else f":{tag}")

    def _parse(self, entries: Iterable[Any]) -> Iterator[CatalogEntry]:
        for value in entries:
            try:
                name = get_name(value)
                descriptor = Descriptor.from_json(value, "index.json")
                reference = Reference.parse(name)
            except (FormatError, UsageError):
                # A malformed entry, or a foreign name, which no API path can contain
                continue
            if reference.name.startswith(self._base):
                repository = reference.name.removeprefix(self._base)
                yield CatalogEntry(name, repository, reference.tag, descriptor)

    def _iter_records(self, repository: str) -> Iterable[tuple[str, bytes]]:
        names = self._repositories.get(repository)
        if names is None:
            return ()
        return names.records.items() if isinstance(names, _Repository) else (names,)

    def has(self, entry: CatalogEntry) -> bool:
        """Return True if this store has the name of an entry of another one."""
        found = self._find_targets(entry.repository, (entry.target,))
        further = self._further.get(entry.repository, ())
        return any(each.name == entry.name for each in (*found, *further))

    def has_repository(self, repository: str) -> bool:
        """Return True if a name is in the repository."""
        return repository in self._repositories

    def list_repositories(self) -> list[str]:
        """Return the repositories that have a name."""
        return list(self._repositories)

    def list_tags(self, repository: str) -> list[str]:
        """Return the tags of a repository."""
        return [target for target, _ in self._iter_records(repository) if ":" not in target]

    def list_entries(self, repository: str) -> list[CatalogEntry]:
        """Return the names of a repository."""
        return [
            *(self._decode(repository, *item) for item in self._iter_records(repository)),
            *self._further.get(repository, ()),
        ]

    def list_indexes(self, repository: str) -> list[CatalogEntry]:
        """Return the names of a repository that refer to indexes."""
        names = self._repositories.get(repository)
        indexes = names.indexes if isinstance(names, _Repository) else ()
        further = self._further.get(repository, ())
        return [
            *self._find_targets(repository, indexes),
            *(entry for entry in further if entry.descriptor.media_type in mediatype.INDEXES),
        ]

    def find(self, reference: Reference) -> list[CatalogEntry]:
        """Return the names with the tag of ``reference`` or, without a tag, its digest."""
        repository, digest = reference.repository, reference.digest
        further = self._further.get(repository, ())
        if digest is None:
            targets: Iterable[str] = (reference.tag or "",)
            more = [entry for entry in further if entry.tag == reference.tag]
        else:
            names = self._repositories.get(repository)
            encoded = bytes.fromhex(digest.encoded)
            if isinstance(names, _Repository):
                targets = names.find(encoded)
            else:
                targets = () if names is None or _get_digest(names[1]) != encoded else (names[0],)
            more = [entry for entry in further if entry.descriptor.digest == digest]
        return [*self._find_targets(repository, targets), *more]

    def _find_targets(self, repository: str, targets: Iterable[str]) -> list[CatalogEntry]:
        names = self._repositories.get(repository)
        if names is None:
            return []
        records = names.records if isinstance(names, _Repository) else dict((names,))
        return [
            self._decode(repository, target, records[target])
            for target in targets
            if target in records
        ]

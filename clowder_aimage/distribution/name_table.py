"""The names of a store as repositories, found by tag and by digest. Independent of HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.index import get_name
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype

_NO_FIELDS: Mapping[str, Any] = {}


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
    """Names of a repository: the first one of each target, those of indexes, and further ones."""

    entries: dict[str, CatalogEntry] = field(default_factory=dict)
    targets: dict[Digest, tuple[str, ...]] = field(default_factory=dict)
    indexes: dict[str, CatalogEntry] = field(default_factory=dict)
    further: list[CatalogEntry] = field(default_factory=list)


class NameTable:
    """The names of one store below ``base``, without it. Calls must not overlap."""

    def __init__(self, reader: EntryReader, base: str) -> None:
        self._reader, self._base = reader, base
        self._repositories: dict[str, _Repository] = {}
        self._has_further = False

    def refresh(self) -> None:
        """Read what changed since the last call. Raises StoreError."""
        changes = self._reader.read()
        if changes is None:
            return
        if changes.removed is not None and not self._has_further:
            self._remove(changes.removed)
            self._add(changes.added)
            if not self._has_further:
                return
        if changes.removed is not None:
            # Which of two entries with one name is the first depends on all of them
            self._reader.reset()
            changes = self._reader.read()
        self._repositories, self._has_further = {}, False
        self._add([] if changes is None else changes.added)

    def _remove(self, entries: Iterable[Any]) -> None:
        for entry in self._parse(entries):
            repository, target = self._repositories[entry.repository], entry.target
            del repository.entries[target]
            repository.indexes.pop(target, None)
            digest = entry.descriptor.digest
            left = tuple(each for each in repository.targets.pop(digest) if each != target)
            if left:
                repository.targets[digest] = left
            if not repository.entries:
                del self._repositories[entry.repository]

    def _add(self, entries: Iterable[Any]) -> None:
        for entry in self._parse(entries):
            repository = self._repositories.setdefault(entry.repository, _Repository())
            target, digest = entry.target, entry.descriptor.digest
            if target in repository.entries:
                repository.further.append(entry)
                self._has_further = True
                continue
            repository.entries[target] = entry
            repository.targets[digest] = (*repository.targets.get(digest, ()), target)
            if entry.descriptor.media_type in mediatype.INDEXES:
                repository.indexes[target] = entry

    def _parse(self, entries: Iterable[Any]) -> Iterable[CatalogEntry]:
        for value in entries:
            try:
                name = get_name(value)
                descriptor = Descriptor.from_json(value, "index.json")
                reference = Reference.parse(name)
            except (FormatError, UsageError):
                # A malformed entry, or a foreign name, which no API path can contain
                continue
            if reference.name.startswith(self._base):
                # Without annotations, which have the name again
                media_type = sys.intern(descriptor.media_type)
                content = Descriptor(
                    media_type, descriptor.digest, descriptor.size, _NO_FIELDS, _NO_FIELDS
                )
                repository = sys.intern(reference.name.removeprefix(self._base))
                yield CatalogEntry(name, repository, reference.tag, content)

    def has(self, entry: CatalogEntry) -> bool:
        """Return True if this store has the name of an entry of another one."""
        names = self._repositories.get(entry.repository, _Repository())
        return entry.name in {each.name for each in names.further} or (
            entry.target in names.entries and names.entries[entry.target].name == entry.name
        )

    def list_repositories(self) -> list[str]:
        """Return the repositories that have a name."""
        return list(self._repositories)

    def list_entries(self, repository: str) -> list[CatalogEntry]:
        """Return the names of a repository."""
        names = self._repositories.get(repository)
        return [] if names is None else [*names.entries.values(), *names.further]

    def list_indexes(self, repository: str) -> list[CatalogEntry]:
        """Return the names of a repository that refer to indexes."""
        names = self._repositories.get(repository)
        if names is None:
            return []
        further = (
            entry for entry in names.further if entry.descriptor.media_type in mediatype.INDEXES
        )
        return [*names.indexes.values(), *further]

    def find(self, reference: Reference) -> list[CatalogEntry]:
        """Return the names with the tag of ``reference`` or, without a tag, its digest."""
        names = self._repositories.get(reference.repository)
        if names is None:
            return []
        if reference.digest is None:
            first = names.entries.get(reference.tag or "")
            targets = [] if first is None else [first]
            further = [entry for entry in names.further if entry.tag == reference.tag]
        else:
            digest = reference.digest
            targets = [names.entries[target] for target in names.targets.get(digest, ())]
            further = [entry for entry in names.further if entry.descriptor.digest == digest]
        return targets + further

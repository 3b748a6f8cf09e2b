"""The names of the layout, as repositories. Independent of HTTP.

A manifest belongs to a repository if a name of that repository (a tag, or the digest itself) refers
to it, directly or through an index. It stays there if a client moves or deletes its tag, until a
collection removes it: clients that resolved the tag earlier pull it by digest. Other manifests are
not served even if their bytes are in the layout.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from clowder_aimage.content.graph import build_referrer_entry, walk
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.distribution.manifest_children import ManifestChildren
from clowder_aimage.distribution.name_table import CatalogEntry, NameTable
from clowder_aimage.errors import (
    AImageError,
    ContentError,
    FormatError,
    NotFoundError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.attachment import list_attachments, list_subjects
from clowder_aimage.layout.repository_record import RepositoryRecords
from clowder_aimage.oci import (
    Descriptor,
    Digest,
    Index,
    Manifest,
    Reference,
    mediatype,
    parse_document,
)

# Manifests in the cache of summaries
MAX_SUMMARIES = 20_000
# Bytes of an index whose summary is cached: summaries hold the whole index
MAX_CACHED_SIZE = 64 * 1024
MAX_ANNOTATION = (
    # Characters of an annotation in a list of referrers; larger ones are left out
    4096
)
# Characters of all annotations of an entry
MAX_ANNOTATIONS = 64 * 1024


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """The entry in a list of referrers, the subject, and the document if it is an index."""

    listed: Descriptor
    subject: Digest | None
    index: Index | None


def _build_summary(document: Manifest | Index, digest: Digest) -> ManifestSummary:
    """Return the summary; annotations and type only if the manifest has a subject."""
    index = document if isinstance(document, Index) else None
    listed = Descriptor(document.media_type, digest, len(document.raw))
    if document.subject is None:
        return ManifestSummary(listed, None, index)
    entry = build_referrer_entry(listed, document)
    left, annotations = MAX_ANNOTATIONS, {}
    for key, value in entry.annotations.items():
        left -= len(key) + len(value)
        if len(key) + len(value) <= MAX_ANNOTATION and left >= 0:
            annotations[key] = value
    entry = replace(entry, annotations=annotations)
    return ManifestSummary(entry, document.subject.digest, index)


class Catalog:
    """Look-ups by repository; what changed in the index of the layout is read again. Thread-safe.

    With a ``base``, only names below it are visible, and repositories are named without it.
    Summaries of manifests are cached by digest.
    """

    def __init__(self, layout: ImageLayout, base: str = "") -> None:
        self._layout = layout
        self._base = f"{base}/" if base else ""
        self.records = RepositoryRecords(layout.root)
        self._summaries: dict[Digest, ManifestSummary] = {}
        self._children = ManifestChildren(self.read)
        self._tables = [NameTable(reader, self._base) for reader in layout.build_entry_readers()]
        self._tables_lock = threading.Lock()

    def list_repositories(self) -> list[str]:
        """Return all repositories that have or had a manifest."""
        recorded = {
            name.removeprefix(self._base)
            for name in self.records.list_repositories()
            if name.startswith(self._base)
        }
        with self._tables_lock:
            for table in self._refresh():
                recorded.update(table.list_repositories())
        return list(recorded)

    def is_known(self, repository: str) -> bool:
        """Return True if the repository has or had a manifest."""
        with self._tables_lock:
            is_named = any(table.has_repository(repository) for table in self._refresh())
        return is_named or self.records.is_known(self._base + repository)

    def list_tags(self, repository: str) -> list[str]:
        """Return the tags of ``repository``, each once."""
        with self._tables_lock:
            tags = {tag for table in self._refresh() for tag in table.list_tags(repository)}
        return list(tags)

    def list_untagged(self, repository: str) -> list[Descriptor]:
        """Return the stored manifests of ``repository`` whose tag was moved or deleted."""
        recorded = self.records.list_untagged(self._base + repository)
        return [content for content in recorded if self._layout.exists(content)]

    def list_manifests(self, repository: str) -> dict[Digest, Descriptor]:
        """Return the manifests of ``repository``, except those that only an index lists."""
        return {content.digest: content for content in self._iter_manifests(repository)}

    def _iter_manifests(self, repository: str) -> Iterator[Descriptor]:
        for entry in self.list_entries(repository):
            yield entry.descriptor
        yield from self.list_untagged(repository)

    def list_entries(self, repository: str) -> list[CatalogEntry]:
        """Return the names of ``repository``."""
        return self._gather(lambda table: table.list_entries(repository))

    def find_entries(self, reference: Reference) -> list[CatalogEntry]:
        """Return the names with the tag of a reference of the API, or with its digest."""
        return self._gather(lambda table: table.find(reference))

    def _gather(self, search: Callable[[NameTable], list[CatalogEntry]]) -> list[CatalogEntry]:
        entries = list[CatalogEntry]()
        with self._tables_lock:
            tables = self._refresh()
            for position, table in enumerate(tables):
                # A name belongs to the first store that has it
                entries += [
                    entry
                    for entry in search(table)
                    if not any(earlier.has(entry) for earlier in tables[:position])
                ]
        return entries

    def _refresh(self) -> list[NameTable]:
        for table in self._tables:
            table.refresh()
        return self._tables

    def qualify(self, reference: Reference) -> Reference:
        """Return the reference in the layout: with the base."""
        name = self._base + reference.repository
        return Reference(None, name, reference.tag, reference.digest)

    def find(self, reference: Reference) -> Descriptor | None:
        """Return the manifest that a reference of the API names, or None."""
        if entries := self.find_entries(reference):
            return entries[0].descriptor
        if reference.digest is None:
            return None
        repository = reference.repository
        indexes = self._gather(lambda table: table.list_indexes(repository))
        found = self._reach(
            (entry.descriptor for entry in indexes), reference.digest
        ) or self._reach(self.list_untagged(repository), reference.digest)
        attached = (x for x in self._iter_attached(repository) if x.digest == reference.digest)
        return found or next(attached, None)

    def reach(self, roots: Mapping[Digest, Descriptor], digest: Digest) -> Descriptor | None:
        """Return the manifest that is one of ``roots``, or that an index among them lists.

        Indexes below one that is nested too deep (content/graph.py) are not searched.
        """
        return roots.get(digest) or self._reach(roots.values(), digest)

    def _reach(self, roots: Iterable[Descriptor], digest: Digest) -> Descriptor | None:
        contents = (content for root in roots for content in self._walk(root))
        return next((content for content in contents if content.digest == digest), None)

    def _index(self, content: Descriptor) -> Index | None:
        if content.media_type in mediatype.INDEXES:
            # One that is missing or damaged hides nothing of others
            with contextlib.suppress(AImageError):
                return self._read_summary(content).index
        return None

    def _read_summary(self, descriptor: Descriptor) -> ManifestSummary:
        """Return the summary of a manifest. Raises NotFoundError, ContentError."""
        cached = self._summaries.get(descriptor.digest)
        if cached is not None:
            return cached
        raw = self.read(descriptor)
        summary = _build_summary(parse_document(raw, descriptor.media_type), descriptor.digest)
        if len(raw) <= MAX_CACHED_SIZE or summary.index is None:
            if len(self._summaries) >= MAX_SUMMARIES:
                self._summaries.clear()
            self._summaries[descriptor.digest] = summary
        return summary

    def iter_summaries(self, repository: str) -> Iterator[ManifestSummary]:
        """Yield the manifests of ``repository``, each once; unreadable ones are skipped."""
        manifests = self.list_manifests(repository)
        manifests |= {content.digest: content for content in self._iter_attached(repository)}
        for descriptor in manifests.values():
            try:
                yield self._read_summary(descriptor)
            except (NotFoundError, ContentError):
                continue

    def _iter_attached(self, repository: str) -> Iterator[Descriptor]:
        """Yield the artifacts that the store has attached to manifests of ``repository``."""
        roots = self._layout.roots
        if subjects := list_subjects(roots):
            for subject in subjects.intersection(self.list_manifests(repository)):
                yield from list_attachments(roots, subject)

    def find_needed(self, repository: str, digests: set[Digest]) -> set[Digest]:
        """Return those of ``digests`` that are manifests of ``repository``, or that these need."""
        needed = set[Digest]()
        for root in chain(self._iter_manifests(repository), self._iter_attached(repository)):
            for content in self._walk(root):
                needed |= digests & {content.digest}
                needed |= digests & self._children.get(content)
            if len(needed) == len(digests):
                break
        return needed

    def admit(self, repository: str, digest: Digest) -> None:
        """Read the manifests of ``repository`` that need a blob, for the policy to admit them."""
        for root in chain(self._iter_manifests(repository), self._iter_attached(repository)):
            for content in self._walk(root):
                if digest == content.digest or digest in self._children.get(content):
                    with contextlib.suppress(AImageError):
                        self.read(content)

    def _walk(self, root: Descriptor) -> Iterator[Descriptor]:
        """Yield a manifest and, of an index, all below it that is not nested too deep."""
        if root.media_type not in mediatype.INDEXES:
            yield root
            return
        with contextlib.suppress(FormatError):
            for node in walk(self._index, root):
                yield node.content

    def read(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a manifest, verified. Raises NotFoundError or VerificationError."""
        if descriptor.media_type not in mediatype.DOCUMENTS:
            # An entry of another tool: the policy would not be asked about it.
            raise NotFoundError(f"{descriptor.digest} is not named as a manifest")
        return read_all(self._layout.open(descriptor), descriptor)

"""The names of the layout, as repositories. Independent of HTTP.

A manifest belongs to a repository if a name of that repository (a tag, or the digest itself) refers
to it, directly or through an index. Other manifests are not served even if their bytes are in the
layout: the next collection may remove the content that they need.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from clowder_aimage.content.graph import build_referrer_entry, walk
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import ContentError, FormatError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import LARGEST, DigestScanner
from clowder_aimage.oci import (
    Descriptor,
    Digest,
    Index,
    Manifest,
    Reference,
    mediatype,
    parse_document,
)

Version = tuple[tuple[int, int, int] | None, ...]
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
# Nanoseconds: longer than a tick of the clock of any usual file system
_FRESH = 100_000_000


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A name in the layout; ``tag`` is None if it is a digest."""

    name: str
    repository: str
    tag: str | None
    descriptor: Descriptor


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


def _read_version(index: Path) -> tuple[int, int, int] | None:
    try:
        status = index.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class Catalog:
    """Look-ups by repository; the index of the layout is read again after it was replaced.

    With a ``base``, only names below it are visible, and repositories are named without it.
    Summaries of manifests are cached by digest.
    """

    def __init__(self, layout: ImageLayout, base: str = "") -> None:
        self._layout = layout
        self._base = f"{base}/" if base else ""
        self._summaries: dict[Digest, ManifestSummary] = {}
        self._searching = threading.Lock()
        self._cached_names: tuple[Version, dict[str, list[CatalogEntry]]] | None = None

    def read_version(self) -> Version:
        """Return a value that changes when the names do."""
        return tuple(_read_version(root / "index.json") for root in self._layout.roots)

    def list_repositories(self) -> list[str]:
        """Return all repositories that have a name."""
        return list(self._load_names())

    def list_entries(self, repository: str) -> list[CatalogEntry]:
        """Return the names of ``repository``."""
        return self._load_names().get(repository, [])

    def _load_names(self) -> dict[str, list[CatalogEntry]]:
        # Taken before reading: later changes are read again
        version = self.read_version()
        if self._cached_names is None or self._cached_names[0] != version:
            names: dict[str, list[CatalogEntry]] = {}
            for entry in self._read_names():
                names.setdefault(entry.repository, []).append(entry)
            if any(
                root_version is None or abs(time.time_ns() - root_version[1]) < _FRESH
                for root_version in version
            ):
                # It may be replaced again within one tick of the file system's clock, unnoticed
                return names
            self._cached_names = version, names
        return self._cached_names[1]

    def _read_names(self) -> Iterator[CatalogEntry]:
        for name, descriptor in self._layout.list_tags():
            try:
                reference = Reference.parse(name)
            except UsageError:
                # A foreign name, which no API path can contain
                continue
            if reference.name.startswith(self._base):
                repository = reference.name.removeprefix(self._base)
                yield CatalogEntry(name, repository, reference.tag, descriptor)

    def qualify(self, reference: Reference) -> Reference:
        """Return the reference in the layout: with the base."""
        name = self._base + reference.repository
        return Reference(None, name, reference.tag, reference.digest)

    def find(self, reference: Reference) -> Descriptor | None:
        """Return the manifest that a reference of the API names, or None."""
        entries = self.list_entries(reference.repository)
        if reference.digest is None:
            return next((e.descriptor for e in entries if e.tag == reference.tag), None)
        return self.reach(entries, reference.digest)

    def reach(self, entries: list[CatalogEntry], digest: Digest) -> Descriptor | None:
        """Return the manifest that ``entries`` refer to, directly or through indexes.

        Indexes below one that is nested too deep (content/graph.py) are not searched.
        """
        roots = {entry.descriptor.digest: entry.descriptor for entry in entries}
        if digest in roots:
            return roots[digest]
        for root in roots.values():
            if root.media_type in mediatype.INDEXES:
                with contextlib.suppress(FormatError):
                    for node in walk(self._index, root):
                        if node.content.digest == digest:
                            return node.content
        return None

    def _index(self, content: Descriptor) -> Index | None:
        if content.media_type in mediatype.INDEXES:
            with contextlib.suppress(NotFoundError):
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
        """Yield the named manifests of ``repository``, each once; unreadable ones are skipped."""
        entries = self.list_entries(repository)
        for descriptor in {e.descriptor.digest: e.descriptor for e in entries}.values():
            try:
                yield self._read_summary(descriptor)
            except (NotFoundError, ContentError):
                continue

    def needs(self, digest: Digest) -> bool:
        """Return True if any name of the layout needs a blob. Not thread-safe."""
        text, scanner = str(digest), DigestScanner()
        with self._searching:
            roots = {str(descriptor.digest) for _, descriptor in self._layout.list_tags()}
            return text in roots or any(
                document is not None and text in document.digests
                for root in roots
                for _, document in scanner.walk(root, self._document)
            )

    def _document(self, digest: str) -> bytes | None:
        content = Descriptor("application/octet-stream", Digest.parse(digest), 0)
        with contextlib.suppress(NotFoundError), self._layout.open(content) as file:
            raw = file.read(LARGEST + 1)
            return raw if len(raw) <= LARGEST else b""
        return None

    def read(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a manifest, verified. Raises NotFoundError or VerificationError."""
        return read_all(self._layout.open(descriptor), descriptor)

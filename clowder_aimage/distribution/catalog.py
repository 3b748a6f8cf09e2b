"""The names of the layout, seen as repositories. No HTTP in here.

A manifest belongs to a repository when a name of that repository (a tag, or the digest itself)
leads to it, directly or through an index. Others are not served even where their bytes are still
in the layout: the next collection may take what they refer to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.distribution.manifest_summary import ManifestSummaries, ManifestSummary
from clowder_aimage.errors import ContentError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import LARGEST, documents, plain
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype

Version = tuple[tuple[int, int, int] | None, ...]
_FRESH = 100_000_000  # nanoseconds
_DOCUMENTS = mediatype.MANIFESTS | mediatype.INDEXES


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One name of the layout, as it stands there; ``tag`` is None where it is a digest."""

    name: str
    repository: str
    tag: str | None
    descriptor: Descriptor


def _version(index: Path) -> tuple[int, int, int] | None:
    try:
        found = index.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Catalog:
    """Look-ups by repository. The layout's index is read again whenever it has been replaced.

    With a ``base``, only names below it are seen, and repositories are called by what follows it.
    """

    def __init__(self, layout: ImageLayout, base: str = "") -> None:
        self._layout = layout
        self._base = f"{base}/" if base else ""
        self._summaries = ManifestSummaries(self.read)
        self._searching = threading.Lock()
        self._known: tuple[Version, dict[str, list[CatalogEntry]]] | None = None

    def version(self) -> Version:
        """Differs where the names do: each index is replaced whole. None where there is none."""
        return tuple(_version(root / "index.json") for root in self._layout.roots)

    def repositories(self) -> list[str]:
        """All that have a name."""
        return list(self._names())

    def entries(self, repository: str) -> list[CatalogEntry]:
        """The names of ``repository``."""
        return self._names().get(repository, [])

    def _names(self) -> dict[str, list[CatalogEntry]]:
        version = self.version()  # before reading: what is newer than it is read again
        if self._known is None or self._known[0] != version:
            names: dict[str, list[CatalogEntry]] = {}
            for entry in self._read_names():
                names.setdefault(entry.repository, []).append(entry)
            if any(each is None or abs(time.time_ns() - each[1]) < _FRESH for each in version):
                return names  # it may be replaced again within one tick of the file system's clock
            self._known = version, names
        return self._known[1]

    def _read_names(self) -> Iterator[CatalogEntry]:
        for name, descriptor in self._layout.tags():
            try:
                reference = Reference.parse(name)
            except UsageError:
                continue  # a foreign name, which no path of the API can spell
            if reference.name.startswith(self._base):
                repository = reference.name.removeprefix(self._base)
                yield CatalogEntry(name, repository, reference.tag, descriptor)

    def stored(self, reference: Reference) -> Reference:
        """What the layout calls it."""
        name = self._base + reference.repository
        return Reference(None, name, reference.tag, reference.digest)

    def find(self, reference: Reference) -> Descriptor | None:
        """The manifest that a reference of the API names, or None."""
        entries = self.entries(reference.repository)
        if reference.digest is None:
            return next((e.descriptor for e in entries if e.tag == reference.tag), None)
        return self.reach(entries, reference.digest)

    def reach(self, entries: list[CatalogEntry], digest: Digest) -> Descriptor | None:
        """What ``entries`` lead to, themselves or through an index.

        Breadth first, so that an index is only read where the names do not tell.
        """
        level = [entry.descriptor for entry in entries]
        seen: set[Digest] = set()
        while level:
            found = next((each for each in level if each.digest == digest), None)
            if found is not None:
                return found
            unread = {each.digest: each for each in level if each.media_type in mediatype.INDEXES}
            level = [
                child
                for each in unread.values()
                if each.digest not in seen
                for child in self._manifests(each)
            ]
            seen |= unread.keys()
        return None

    def _manifests(self, descriptor: Descriptor) -> tuple[Descriptor, ...]:
        try:
            return self._summaries.of(descriptor).manifests
        except NotFoundError:
            return ()

    def summaries(self, repository: str) -> Iterator[ManifestSummary]:
        """What the manifests with a name in ``repository`` are, each once; those that are named
        but cannot be read are left out."""
        entries = self.entries(repository)
        for descriptor in {e.descriptor.digest: e.descriptor for e in entries}.values():
            try:
                yield self._summaries.of(descriptor)
            except (NotFoundError, ContentError):
                continue

    def needs(self, digest: Digest) -> bool:
        """Whether any name of the whole layout leads to a blob. Reads every manifest, one at a
        time, and for one caller at a time."""
        wanted = str(digest).encode()
        with self._searching:
            level = {descriptor.digest for _, descriptor in self._layout.tags()}
            seen: set[Digest] = set()
            while level:
                if digest in level:
                    return True
                seen |= level
                below: set[Digest] = set()
                for each in level:
                    raw = self._document(each)
                    if wanted in raw:
                        return True
                    below.update(documents(raw))
                level = below - seen
        return False

    def _document(self, digest: Digest) -> bytes:
        content = Descriptor("application/octet-stream", digest, 0)
        try:
            with self._layout.open(content) as file:
                raw = file.read(LARGEST + 1)
        except NotFoundError:
            return b""
        return plain(raw) if len(raw) <= LARGEST else b""

    def read(self, descriptor: Descriptor) -> bytes:
        """The bytes of a manifest, verified. Raises NotFoundError or VerificationError."""
        return read_all(self._layout.open(descriptor), descriptor)

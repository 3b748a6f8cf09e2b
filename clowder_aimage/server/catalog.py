"""The names of the layout, seen as repositories. No HTTP in here.

A manifest belongs to a repository when a name of that repository (a tag, or the digest itself)
leads to it, directly or through an index. Others are not served even where their bytes are still
in the layout: the next collection may take what they refer to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.content.verify import read_all
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Index, Reference, mediatype, parse_document


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the layout; ``tag`` is None where it is a digest."""

    repository: str
    tag: str | None
    descriptor: Descriptor

    @property
    def reference(self) -> Reference:
        """The local reference that the layout knows it by."""
        digest = None if self.tag else self.descriptor.digest
        return Reference(None, self.repository, self.tag, digest)


class Catalog:
    """Look-ups by repository. Every call reads the layout's index anew."""

    def __init__(self, layout: ImageLayout) -> None:
        self._layout = layout

    def entries(self, repository: str | None = None) -> Iterator[Entry]:
        """The names of ``repository``, or of all."""
        for name, descriptor in self._layout.tags():
            try:
                reference = Reference.parse(name)
            except UsageError:
                continue  # a foreign name, which no path of the API can spell
            if repository is None or reference.name == repository:
                yield Entry(reference.name, reference.tag, descriptor)

    def find(self, reference: Reference) -> Descriptor | None:
        """The manifest that a local reference names, or None."""
        entries = list(self.entries(reference.repository))
        if reference.digest is None:
            return next((e.descriptor for e in entries if e.tag == reference.tag), None)
        return self._reach([entry.descriptor for entry in entries], reference.digest)

    def _reach(self, start: list[Descriptor], digest: Digest) -> Descriptor | None:
        """Search breadth first, so that an index is only read where the names do not tell."""
        level = start
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
                for child in self._children(each)
            ]
            seen |= unread.keys()
        return None

    def _children(self, descriptor: Descriptor) -> tuple[Descriptor, ...]:
        try:
            document = parse_document(self.read(descriptor), descriptor.media_type)
        except NotFoundError:
            return ()
        return document.manifests if isinstance(document, Index) else ()

    def read(self, descriptor: Descriptor) -> bytes:
        """The bytes of a manifest, verified. Raises NotFoundError or VerificationError."""
        return read_all(self._layout.open(descriptor), descriptor)

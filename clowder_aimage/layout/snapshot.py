"""The names and blobs of a store, read once while nothing in it changes."""

from __future__ import annotations

import contextlib

from clowder_aimage.errors import UsageError
from clowder_aimage.layout.entry_name import is_same_name
from clowder_aimage.layout.layout import ImageLayout, index_name
from clowder_aimage.oci import Descriptor, Reference


def find_descriptor(store: ImageLayout, reference: Reference) -> Descriptor | None:
    """Return the descriptor of exactly this name; a digest does not match other names."""
    text = index_name(reference)
    parsed = Reference.parse(text)
    for name, descriptor in store.iter_candidates(reference):
        is_same = name == text or is_same_name(name, parsed)
        if is_same and reference.digest in (None, descriptor.digest):
            return descriptor
    return None


class StoreSnapshot:
    """The names and blobs of a store at one time. Thread-safe.

    Unless it ``is_settled``, so that any change makes another snapshot, nothing is remembered.
    """

    def __init__(self, store: ImageLayout, *, is_settled: bool = False) -> None:
        self.store, self._is_settled = store, is_settled
        self._names: dict[str, list[Descriptor]] | None = None
        # The sizes of blobs by their encoded digests
        self._sizes: dict[str, int] = {}

    def find(self, reference: Reference) -> Descriptor | None:
        """Return the descriptor of exactly this name, as ``find_descriptor``. Raises StoreError."""
        if not self._is_settled:
            return find_descriptor(self.store, reference)
        if self._names is None:
            names: dict[str, list[Descriptor]] = {}
            for name, descriptor in self.store.list_tags():
                # Names of other tools may not be references
                with contextlib.suppress(UsageError):
                    names.setdefault(str(Reference.parse(name)), []).append(descriptor)
            self._names = names
        found = self._names.get(index_name(reference), ())
        matches = (item for item in found if reference.digest in (None, item.digest))
        return next(matches, None)

    def exists(self, content: Descriptor) -> bool:
        """Return True if a blob is stored. Raises StoreError."""
        if self._sizes.get(content.digest.encoded) == content.size:
            return True
        exists = self.store.exists(content)
        if exists and self._is_settled:
            self._sizes[content.digest.encoded] = content.size
        return exists

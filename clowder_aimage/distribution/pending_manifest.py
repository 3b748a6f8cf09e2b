"""Manifests of a cache that have no name in the layout yet, since not all of their blobs are here.

A name of the layout never leads to half an artifact. A cache gets the manifest first, and the
blobs as its clients ask for them: so the name waits for the last one. No HTTP in here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.served_lease import ServedLeases
from clowder_aimage.errors import ContentError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, parse_document

MOST = 64  # manifests that may wait; the one that has waited longest is forgotten


@dataclass(slots=True)
class _Waiter:
    """A manifest waits for all of ``missing``; an index for any, as clients take one of it."""

    reference: Reference
    descriptor: Descriptor
    missing: dict[Digest, int]
    waits_for_any: bool

    def take(self, digest: Digest) -> bool:
        """Whether it is complete now that ``digest`` is here."""
        if self.missing.pop(digest, None) is None:
            return False
        return self.waits_for_any or not self.missing


class PendingManifests:
    """The names to be given. Threads may share it."""

    def __init__(self, layout: ImageLayout, catalog: Catalog, kept: ServedLeases) -> None:
        self._layout = layout
        self._catalog = catalog
        self._kept = kept
        self._lock = threading.Lock()
        self._waiters: OrderedDict[Reference, _Waiter] = OrderedDict()

    def add(self, reference: Reference, descriptor: Descriptor, raw: bytes) -> None:
        """A manifest came for a reference of the API: name it, at once or later."""
        document = parse_document(raw, descriptor.media_type)
        self._kept.add(descriptor.digest, *(child.digest for child in document.children))
        with self._layout.keep():
            waiter = self._waiter(reference, descriptor, document)
            with self._lock:
                self._waiters.pop(reference, None)
                if waiter is not None:
                    self._waiters[reference] = waiter
                    if len(self._waiters) > MOST:
                        self._waiters.popitem(last=False)
                    return
            if reference.digest is None or self._catalog.find(reference) is None:
                self._layout.tag(descriptor, self._catalog.stored(reference))

    def _waiter(
        self, reference: Reference, descriptor: Descriptor, document: Manifest | Index
    ) -> _Waiter | None:
        """What it waits for; None where it need not."""
        is_here: Callable[[Descriptor], bool] = self._layout.exists
        is_index = isinstance(document, Index)
        if is_index:
            is_here = self._is_whole
        missing = {each.digest: each.size for each in document.children if not is_here(each)}
        complete = not missing or (is_index and len(missing) < len(document.children))
        return None if complete else _Waiter(reference, descriptor, missing, is_index)

    def _is_whole(self, descriptor: Descriptor) -> bool:
        """Whether a manifest of an index is here with all of its blobs."""
        if not self._layout.exists(descriptor):
            return False
        try:
            raw = read_all(self._layout.open(descriptor), descriptor)
            document = parse_document(raw, descriptor.media_type)
        except (NotFoundError, ContentError):
            return False
        return all(self._layout.exists(child) for child in document.children)

    def find(self, reference: Reference) -> Descriptor | None:
        """The manifest that a reference means, and that has no name yet."""
        with self._lock:
            if reference.digest is None:
                waiter = self._waiters.get(reference)
                return None if waiter is None else waiter.descriptor
            for waiter in self._waiters.values():
                same = waiter.reference.repository == reference.repository
                if same and waiter.descriptor.digest == reference.digest:
                    return waiter.descriptor
            return None

    def size(self, digest: Digest) -> int | None:
        """How many bytes a blob that is waited for has, as its manifest says."""
        with self._lock:
            found = (waiter.missing.get(digest) for waiter in self._waiters.values())
            return next((size for size in found if size is not None), None)

    def arrived(self, digest: Digest) -> None:
        """A blob is here: give the names that waited for it alone.

        Raises:
            AccessError, ContentError: what it completes cannot be read, or not be named.
        """
        with self._lock:
            complete = [waiter for waiter in self._waiters.values() if waiter.take(digest)]
            for waiter in complete:
                del self._waiters[waiter.reference]
        # tags before digests: a manifest that a tag leads to needs no name of its own
        for waiter in sorted(complete, key=lambda one: one.reference.digest is not None):
            self.arrived(waiter.descriptor.digest)  # an index may wait for it
            raw = read_all(self._layout.open(waiter.descriptor), waiter.descriptor)
            self.add(waiter.reference, waiter.descriptor, raw)  # looks once more at all of it

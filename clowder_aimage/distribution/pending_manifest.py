"""Manifests of a cache without a name in the layout, because some of their blobs are missing.

A cache fetches the manifest first, and the blobs as clients request them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.served_blobs import ServedBlobs
from clowder_aimage.errors import ContentError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, parse_document

MAX_PENDING = 64  # manifests; the oldest is dropped


@dataclass(slots=True)
class _Waiter:
    """A manifest that needs all of ``missing``, or an index that needs any of them."""

    reference: Reference
    descriptor: Descriptor
    missing: dict[Digest, int]
    waits_for_any: bool

    def take(self, digest: Digest) -> bool:
        """Return True if it is complete now that ``digest`` has arrived."""
        if self.missing.pop(digest, None) is None:
            return False
        return self.waits_for_any or not self.missing


class PendingManifests:
    """The manifests without names. Thread-safe."""

    def __init__(self, layout: ImageLayout, catalog: Catalog, blobs: ServedBlobs) -> None:
        self._layout, self._catalog, self._blobs = layout, catalog, blobs
        self._lock = threading.Lock()
        self._waiters: OrderedDict[Reference, _Waiter] = OrderedDict()

    def add(self, reference: Reference, descriptor: Descriptor, raw: bytes) -> None:
        """Name a manifest by a reference of the API, as soon as it is complete."""
        document = parse_document(raw, descriptor.media_type)
        self._blobs.expect(descriptor.digest, *(child.digest for child in document.children))
        with self._layout.keep():
            waiter = self._waiter(reference, descriptor, document)
            with self._lock:
                self._waiters.pop(reference, None)
                if waiter is not None:
                    self._waiters[reference] = waiter
                    if len(self._waiters) > MAX_PENDING:
                        self._waiters.popitem(last=False)
                    return
            if reference.digest is None or self._catalog.find(reference) is None:
                self._layout.tag(descriptor, self._catalog.stored(reference))

    def _waiter(
        self, reference: Reference, descriptor: Descriptor, document: Manifest | Index
    ) -> _Waiter | None:
        """Return the missing blobs, or None if it is complete."""
        is_index = isinstance(document, Index)
        is_here = self._is_whole if is_index else self._layout.exists
        missing = {each.digest: each.size for each in document.children if not is_here(each)}
        complete = not missing or (is_index and len(missing) < len(document.children))
        return None if complete else _Waiter(reference, descriptor, missing, is_index)

    def _is_whole(self, descriptor: Descriptor) -> bool:
        """Return True if a manifest of an index is stored with all of its blobs."""
        if not self._layout.exists(descriptor):
            return False
        try:
            raw = read_all(self._layout.open(descriptor), descriptor)
            document = parse_document(raw, descriptor.media_type)
        except (NotFoundError, ContentError):
            return False
        return all(self._layout.exists(child) for child in document.children)

    def find(self, reference: Reference) -> Descriptor | None:
        """Return the manifest without a name that a reference of the API names."""
        digest = reference.digest
        with self._lock:
            for known, waiter in self._waiters.items():
                same = known.repository == reference.repository and digest is not None
                if known == reference or (same and waiter.descriptor.digest == digest):
                    return waiter.descriptor
        return None

    def size(self, digest: Digest) -> int | None:
        """Return the size of a missing blob, as stated in its manifest."""
        with self._lock:
            found = (waiter.missing.get(digest) for waiter in self._waiters.values())
            return next((size for size in found if size is not None), None)

    def arrived(self, digest: Digest) -> None:
        """Name the manifests that a blob completes. Raises AccessError, ContentError."""
        with self._lock:
            complete = [waiter for waiter in self._waiters.values() if waiter.take(digest)]
            for waiter in complete:
                del self._waiters[waiter.reference]
        # tags before digests: a manifest with a tag needs no name by digest
        for waiter in sorted(complete, key=lambda one: one.reference.digest is not None):
            self.arrived(waiter.descriptor.digest)  # an index may wait for it
            raw = read_all(self._layout.open(waiter.descriptor), waiter.descriptor)
            self.add(waiter.reference, waiter.descriptor, raw)  # checks all of it again

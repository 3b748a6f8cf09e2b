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

# Manifests; the oldest is dropped
MAX_PENDING = 64


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
        """Tag a manifest with a reference of the API, as soon as it is complete."""
        document = parse_document(raw, descriptor.media_type)
        self._blobs.expect(descriptor.digest, *(child.digest for child in document.children))
        with self._layout.keep():
            waiter = self._create_waiter(reference, descriptor, document)
            with self._lock:
                self._waiters.pop(reference, None)
                if waiter is not None:
                    self._waiters[reference] = waiter
                    if len(self._waiters) > MAX_PENDING:
                        self._waiters.popitem(last=False)
                    return
            if reference.digest is None or self._catalog.find(reference) is None:
                self._layout.tag(descriptor, self._catalog.qualify(reference))

    def _create_waiter(
        self, reference: Reference, descriptor: Descriptor, document: Manifest | Index
    ) -> _Waiter | None:
        """Return the missing blobs, or None if it is complete."""
        is_index = isinstance(document, Index)
        is_stored = self._is_complete if is_index else self._layout.exists
        missing = {child.digest: child.size for child in document.children if not is_stored(child)}
        complete = not missing or (is_index and len(missing) < len(document.children))
        return None if complete else _Waiter(reference, descriptor, missing, is_index)

    def _is_complete(self, descriptor: Descriptor) -> bool:
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
            for pending, waiter in self._waiters.items():
                is_in_repository = pending.repository == reference.repository and digest is not None
                if pending == reference or (
                    is_in_repository and waiter.descriptor.digest == digest
                ):
                    return waiter.descriptor
        return None

    def find_size(self, digest: Digest) -> int | None:
        """Return the size of a missing blob, as stated in its manifest."""
        with self._lock:
            sizes = (waiter.missing.get(digest) for waiter in self._waiters.values())
            return next((size for size in sizes if size is not None), None)

    def tag_completed(self, digest: Digest) -> None:
        """Tag the manifests that a blob completes. Raises AccessError, ContentError."""
        with self._lock:
            complete = [waiter for waiter in self._waiters.values() if waiter.take(digest)]
            for waiter in complete:
                del self._waiters[waiter.reference]
        # Tags before digests: a manifest with a tag needs no name by digest
        for waiter in sorted(complete, key=lambda pending: pending.reference.digest is not None):
            # An index may wait for it
            self.tag_completed(waiter.descriptor.digest)
            raw = read_all(self._layout.open(waiter.descriptor), waiter.descriptor)
            # Checks all of it again
            self.add(waiter.reference, waiter.descriptor, raw)

"""The blobs of the layout that are served: all except deleted ones.

Other processes share the layout, and may be about to tag a manifest that needs a blob. Deleting a
blob therefore only stops serving it, and leaves its bytes to garbage collection. A blob that a
manifest needs is always served.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import BinaryIO

from clowder_aimage.distribution.catalog import Catalog, Version
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest

MEDIA_TYPE = "application/octet-stream"
# Seconds that a digest is leased at least; twice that at most
PERIOD = 3600.0


class ServedLeases:
    """The leases of a server. Thread-safe."""

    def __init__(self, layout: ImageLayout, clock: Callable[[], float]) -> None:
        self._layout, self._clock = layout, clock
        self._lock = threading.Lock()
        self._since = clock()
        self._lease, self._older = layout.lease(), layout.lease()

    def add(self, *digests: Digest) -> None:
        """Lease content; check its existence only afterwards. Raises StoreError."""
        with self._lock:
            if self._clock() - self._since > PERIOD:
                self._since = self._clock()
                self._older.close()
                self._older, self._lease = self._lease, self._layout.lease()
            self._lease.add(*digests)

    def rotate(self) -> None:
        """Release leases older than PERIOD."""
        self.add()

    def close(self) -> None:
        """Release all leases."""
        with self._lock, contextlib.suppress(OSError):
            self._older.close()
            self._lease.close()


class ServedBlobs:
    """The blobs of ``layout``: one store, available under every repository name.

    Blobs reported to a client are leased. Methods raise DistributionError.
    """

    def __init__(self, layout: ImageLayout, catalog: Catalog, leases: ServedLeases) -> None:
        self._layout, self._catalog, self._leases = layout, catalog, leases
        # Deleted blobs, and the version of the names by which they were checked last
        self._deleted: dict[Digest, Version] = {}

    def open(self, digest: Digest) -> BinaryIO:
        """Open a blob. It stays readable if it is removed. Raises BLOB_UNKNOWN."""
        with contextlib.suppress(NotFoundError):
            if not self._is_deleted(digest):
                return self._layout.open(Descriptor(MEDIA_TYPE, digest, 0))
        raise DistributionError("BLOB_UNKNOWN", {"digest": str(digest)})

    def read_size(self, digest: Digest) -> int:
        """Return the size of a blob, and lease it for the client. Raises BLOB_UNKNOWN."""
        # Only stored blobs are leased: clients may request any digest
        self.open(digest).close()
        self._leases.add(digest)
        with self.open(digest) as file:
            return os.fstat(file.fileno()).st_size

    def has(self, digest: Digest) -> bool:
        """Return True if a blob is served, and lease it for the client."""
        try:
            self.read_size(digest)
        except DistributionError:
            return False
        return True

    def holds(self, content: Descriptor) -> bool:
        """Return True if a blob is served with the size of ``content``."""
        return self._layout.exists(content) and not self._is_deleted(content.digest)

    def remove(self, digest: Digest) -> None:
        """Stop serving a blob until it is pushed again. Raises BLOB_UNKNOWN, UNSUPPORTED."""
        self.open(digest).close()
        version = self._catalog.read_version()
        if self._catalog.needs(digest):
            message = "a manifest of this registry refers to the blob: delete the manifest"
            raise DistributionError("UNSUPPORTED", message=message, headers={"Allow": "GET, HEAD"})
        self._deleted[digest] = version

    def expect(self, *digests: Digest) -> None:
        """Lease content that will arrive before it has a name."""
        self._leases.add(*digests)

    def put(self, digest: Digest) -> None:
        """Serve a blob that was pushed, possibly again."""
        self._deleted.pop(digest, None)

    def _is_deleted(self, digest: Digest) -> bool:
        if digest not in self._deleted:
            return False
        version = self._catalog.read_version()
        # The names have changed: they may need the blob again
        if self._deleted[digest] != version:
            if self._catalog.needs(digest):
                self._deleted.pop(digest, None)
                return False
            self._deleted[digest] = version
        return True

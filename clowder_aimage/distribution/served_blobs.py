"""The blobs of the layout that are served, by repository.

Repositories share the bytes of blobs, and other processes share the layout. Deleting a blob
therefore only removes it from a repository, and leaves its bytes to garbage collection. A blob that
a manifest of the repository needs is always served.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from clowder_aimage.content.gate import find_gate
from clowder_aimage.distribution.catalog import Catalog
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
    """The blobs of ``layout``, as each repository has them. Blobs reported to a client are leased.

    A repository has the blobs that its manifests need, and those that were pushed to it or mounted,
    and not deleted since. With ``shares_all``, each repository has all blobs of the layout: a cache
    and a node only read, for clients that may read all of it. Methods raise DistributionError.
    """

    def __init__(
        self,
        layout: ImageLayout,
        catalog: Catalog,
        leases: ServedLeases,
        *,
        shares_all: bool = False,
    ) -> None:
        self._layout, self._catalog, self._leases = layout, catalog, leases
        self._records, self._shares_all = catalog.records, shares_all

    def serve(self, repository: str, digest: Digest) -> BinaryIO:
        """Open a blob for a client. Raises BLOB_UNKNOWN; DENIED: the policy does not accept it."""
        self.admit(repository, digest)
        return self.open(repository, digest)

    def admit(self, repository: str, digest: Digest) -> None:
        """Raise DENIED for a blob of no manifest that the policy accepts."""
        gate = find_gate()
        if gate is None or gate.has_admitted(digest):
            return
        # A manifest of the repository that is accepted admits its blobs when it is read.
        self._catalog.admit(repository, digest)
        if not gate.has_admitted(digest):
            raise DistributionError("DENIED", {"digest": str(digest)})

    def open(self, repository: str, digest: Digest) -> BinaryIO:
        """Open a blob. It stays readable if it is removed. Raises BLOB_UNKNOWN."""
        # First, since it is cheaper for a blob that is not stored
        file = self._open(digest)
        try:
            if self._is_in(repository, digest):
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        raise _build_unknown_error(digest)

    def _open(self, digest: Digest) -> BinaryIO:
        try:
            return self._layout.open(Descriptor(MEDIA_TYPE, digest, 0))
        except NotFoundError:
            raise _build_unknown_error(digest) from None

    def _is_in(self, repository: str, digest: Digest) -> bool:
        return not self._find_absent(repository, {digest})

    def _find_absent(self, repository: str, digests: set[Digest]) -> set[Digest]:
        """Return those of ``digests`` that the repository does not have, stored or not."""
        if self._shares_all:
            return set()
        absent = {digest for digest in digests if not self._records.has_blob(repository, digest)}
        return absent - self._catalog.find_needed(repository, absent) if absent else absent

    def read_size(self, repository: str, digest: Digest) -> int:
        """Return the size of a blob, and lease it for the client. Raises BLOB_UNKNOWN."""
        # Only blobs of the repository are leased: clients may request any digest
        self.open(repository, digest).close()
        self._leases.add(digest)
        with self._open(digest) as file:
            return os.fstat(file.fileno()).st_size

    def has(self, repository: str, digest: Digest) -> bool:
        """Return True if the repository has a blob, and lease it for the client."""
        try:
            self.read_size(repository, digest)
        except DistributionError:
            return False
        return True

    def find_missing(self, repository: str, contents: Iterable[Descriptor]) -> list[Descriptor]:
        """Return the contents that the repository does not have, or not with their sizes."""
        contents = list(contents)
        absent = self._find_absent(repository, {content.digest for content in contents})
        return [
            content
            for content in contents
            if content.digest in absent or not self._layout.exists(content)
        ]

    def mount(self, repository: str, digest: Digest, source: str | None) -> bool:
        """Add a blob that the repository ``source`` has, or any; return False if it has not."""
        with contextlib.suppress(DistributionError):
            self._open(digest).close()
            if self._is_in_any(digest) if source is None else self._is_in(source, digest):
                with self.adding(repository, digest):
                    self._open(digest).close()
                return True
        return False

    def _is_in_any(self, digest: Digest) -> bool:
        repositories = self._catalog.list_repositories()
        return self._records.has_blob_anywhere(digest) or any(
            self._catalog.find_needed(repository, {digest}) for repository in repositories
        )

    def remove(self, repository: str, digest: Digest) -> None:
        """Remove a blob from the repository, durably. Raises BLOB_UNKNOWN, UNSUPPORTED.

        Its bytes, and the leases of clients, stay: other repositories have it, and other processes
        may be about to name a manifest that needs it.
        """
        self.open(repository, digest).close()
        if self._catalog.find_needed(repository, {digest}):
            message = "a manifest of this repository refers to the blob: delete the manifest"
            raise DistributionError("UNSUPPORTED", message=message, headers={"Allow": "GET, HEAD"})
        self._records.remove_blob(repository, digest)

    def expect(self, *digests: Digest) -> None:
        """Lease content that will arrive before it has a name."""
        self._leases.add(*digests)

    @contextlib.contextmanager
    def adding(self, repository: str, digest: Digest) -> Iterator[None]:
        """Lease a blob that has no name yet, and add it to the repository once it is stored."""
        self._leases.add(digest)
        yield
        # A collection removes records of blobs that are not stored
        with self._layout.keep():
            self._records.add_blob(repository, digest)


def _build_unknown_error(digest: Digest) -> DistributionError:
    return DistributionError("BLOB_UNKNOWN", {"digest": str(digest)})

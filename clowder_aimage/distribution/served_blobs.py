"""Which blobs of the layout are served: all but those that a client has deleted. No HTTP in here.

The layout is shared with other processes, which may be about to name what no name leads to yet.
So deleting a blob takes it off the shelf at once and for all, and leaves its bytes to garbage
collection. A blob that is needed is on the shelf whatever was said of it.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from clowder_aimage.distribution.catalog import Catalog, Version
from clowder_aimage.distribution.distribution_error import DistributionError
from clowder_aimage.distribution.served_lease import ServedLeases
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest

MEDIA_TYPE = "application/octet-stream"


class ServedBlobs:
    """The blobs of ``layout``. It is one store: they are found under every repository name.

    What clients hear of, so that they do not send it, is ``kept`` from collection.
    """

    def __init__(self, layout: ImageLayout, catalog: Catalog, kept: ServedLeases) -> None:
        self._layout = layout
        self._catalog = catalog
        self._kept = kept
        self._gone: dict[Digest, Version] = {}  # with the names that did not need it

    def open(self, digest: Digest) -> BinaryIO:
        """The file of a blob; it stays readable if its name goes away meanwhile.

        Raises:
            ApiError: BLOB_UNKNOWN.
        """
        try:
            if not self._is_gone(digest):
                return self._layout.open(Descriptor(MEDIA_TYPE, digest, 0))
        except NotFoundError:
            pass
        raise DistributionError("BLOB_UNKNOWN", {"digest": str(digest)})

    def size(self, digest: Digest) -> int:
        """How many bytes a blob has that a client may rely on from now on.

        Raises:
            ApiError: BLOB_UNKNOWN.
        """
        self.open(digest).close()  # only what is here is kept: anyone may ask for anything
        self._kept.add(digest)
        with self.open(digest) as file:
            return os.fstat(file.fileno()).st_size

    def has(self, digest: Digest) -> bool:
        """Whether a client may rely on it from now on."""
        try:
            self.size(digest)
        except DistributionError:
            return False
        return True

    def holds(self, content: Descriptor) -> bool:
        """Whether it is served, with the size that ``content`` claims."""
        return self._layout.exists(content) and not self._is_gone(content.digest)

    def remove(self, digest: Digest) -> None:
        """Serve it no more, until it is pushed again.

        Raises:
            ApiError: BLOB_UNKNOWN; UNSUPPORTED, a manifest needs it.
        """
        self.open(digest).close()
        version = self._catalog.version()
        if self._catalog.needs(digest):
            message = "a manifest of this registry needs the blob: delete that first"
            raise DistributionError("UNSUPPORTED", message=message, headers={"Allow": "GET, HEAD"})
        self._gone[digest] = version

    def expect(self, digest: Digest) -> None:
        """It is about to come: no collection may take it before it has a name."""
        self._kept.add(digest)

    def put(self, digest: Digest) -> None:
        """It was pushed, maybe again."""
        self._gone.pop(digest, None)

    def _is_gone(self, digest: Digest) -> bool:
        if digest not in self._gone:
            return False
        version = self._catalog.version()
        if self._gone[digest] != version:  # there are new names: they may need it
            if self._catalog.needs(digest):
                self._gone.pop(digest, None)
                return False
            self._gone[digest] = version
        return True

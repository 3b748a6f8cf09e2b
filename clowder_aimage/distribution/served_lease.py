"""What clients were told is here, and no name leads to yet: no collection may take it from them.

A client pushes blobs, or hears that they are here, and then the manifest. Until that has a name
the blobs are leased: for a while, since most of what is asked for is never needed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest

PERIOD = 3600.0  # seconds that a digest is kept at least; twice that at most


class ServedLeases:
    """The leases of a server. Threads may share it."""

    def __init__(self, layout: ImageLayout, clock: Callable[[], float]) -> None:
        self._layout = layout
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._lease = layout.lease()
        self._older = layout.lease()

    def add(self, *digests: Digest) -> None:
        """Keep these; ask only then whether they are there. Raises StoreError."""
        with self._lock:
            self._turn()
            self._lease.add(*digests)

    def turn(self) -> None:
        """Let go of what was kept for long."""
        with self._lock:
            self._turn()

    def _turn(self) -> None:
        if self._clock() - self._since > PERIOD:
            self._since = self._clock()
            self._older.close()
            self._older, self._lease = self._lease, self._layout.lease()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock, contextlib.suppress(OSError):
            self._older.close()
            self._lease.close()

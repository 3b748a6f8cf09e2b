"""Leases on content that clients rely on, and that no manifest names yet.

A client pushes blobs, or finds that they are here, and then pushes the manifest. Until then a lease
keeps them from garbage collection, for a while: most requests are not followed by a push.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest

PERIOD = 3600.0  # seconds for which a digest is kept at least; twice that at most


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
        """Keep content; check only afterwards that it is here. Raises StoreError."""
        with self._lock:
            self._turn()
            self._lease.add(*digests)

    def turn(self) -> None:
        """Release what was kept for PERIOD."""
        with self._lock:
            self._turn()

    def _turn(self) -> None:
        if self._clock() - self._since > PERIOD:
            self._since = self._clock()
            self._older.close()
            self._older, self._lease = self._lease, self._layout.lease()

    def close(self) -> None:
        """Release everything."""
        with self._lock, contextlib.suppress(OSError):
            self._older.close()
            self._lease.close()

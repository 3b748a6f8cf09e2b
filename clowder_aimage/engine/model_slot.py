"""A model that is loaded, or will be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from clowder_aimage.engine.runner import Runner
from clowder_aimage.oci import Descriptor, Digest, Reference

MAX_KEEP_ALIVE = 100 * 365 * 86400.0  # seconds; longer is for ever


class ModelSlot:
    """A model that is in use, or was recently.

    ``size`` is the bytes of its blobs, ``current`` the request that is served, ``users`` the number
    of requests that wait or are served.
    """

    def __init__(
        self,
        reference: Reference,
        manifest: Descriptor,
        *,
        size: int = 0,
        keep_alive: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reference, self.manifest, self.size = reference, manifest, size
        self.keep_alive = keep_alive
        self.runner: Runner | None = None
        self.load: asyncio.Task[Runner] | None = None
        self.unloading: asyncio.Task[None] | None = None  # if it was stopped while it was loaded
        self.current: object | None = None
        self.users = 0
        self.is_stopped = False
        self.used = clock()
        self._clock = clock

    @property
    def digest(self) -> Digest:
        """The digest of its manifest."""
        return self.manifest.digest

    @property
    def is_ready(self) -> bool:
        """True while it is in memory."""
        return self.runner is not None and self.runner.is_alive

    @property
    def is_free(self) -> bool:
        """True if it is in memory and would serve a request at once."""
        runner = self.runner
        return self.current is None and runner is not None and runner.is_free

    @property
    def left(self) -> float:
        """Seconds until it may be unloaded."""
        if self.users:
            return self.keep_alive
        return max(0.0, self.used + self.keep_alive - self._clock())

    @property
    def until(self) -> datetime | None:
        """The time at which it may be unloaded; None for never."""
        left = self.left
        return None if left >= MAX_KEEP_ALIVE else datetime.now(UTC) + timedelta(seconds=left)

    def pinned_name(self, reference: Reference) -> str:
        """Return ``reference`` with the digest that it had when the model was first requested."""
        return f"{str(reference).partition('@')[0]}@{self.digest}"
